"""Import every committed published folder with jaxtrain and export it again, for transformers to open.

JAX_PLATFORMS=cpu python scripts/export_published.py EXPORTS [NAME ...] [--own-config]
ORACLE/bin/python scripts/check_published.py EXPORTS --original tests/interop/published
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import jaxtrain as jt  # noqa: E402  (the checkout's, not an installed one)

PUBLISHED = HERE.parent / "tests" / "interop" / "published"


def main() -> None:
    """Write the folders, and one line for each that is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", type=Path, help="folder to make, with a folder per export")
    parser.add_argument("names", nargs="*", help="folders of tests/interop/published; all, where none is named")
    parser.add_argument(
        "--own-config", action="store_true", help="write config.json from our model group alone, as a trained run does"
    )
    arguments = parser.parse_args()
    refused = 0
    for name in arguments.names or sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir()):
        try:
            pretrained = jt.load_pretrained(PUBLISHED / name)
            jt.save_pretrained(
                arguments.exports / name,
                pretrained.params,
                model=pretrained.config if arguments.own_config else pretrained,
                model_state=pretrained.model_state,
            )
        except Exception as error:  # what is not a line of ours is a fault too, and the rest is still to be written
            refused += 1
            kind = "" if isinstance(error, jt.UserError) else f"{type(error).__name__}: "
            print(f"{name}: {kind}{error}", flush=True)
    sys.exit(bool(refused))


if __name__ == "__main__":
    main()
