"""What published models say: their keys, their sizes, the names and shapes of their tensors, their files. No jax here.

families/ holds one file per family and the table of all of them; the rest of the folder is what those files are
written with (keys, entries, transforms, rope) and how published files are read and written (safetensors, folder).
docs/adding_a_family.md shows how a family is added.
"""
