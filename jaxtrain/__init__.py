"""jaxtrain: functional JAX training on NVIDIA GPUs, TPUs and CPUs with one pure, sharded train step.

`__init__.pyi` lists the public names, for editors and for this file. A name is imported when it is first used, so that
`import jaxtrain` takes no time and does not start jax.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
