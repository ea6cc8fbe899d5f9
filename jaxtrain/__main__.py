"""`python -m jaxtrain` is the `jaxtrain` command."""

from jaxtrain.cli import run_program

if __name__ == "__main__":
    run_program()
