"""Where compiled programs are kept from one process to the next."""

import os
import tempfile
import warnings
from pathlib import Path

from jaxtrain.config.arguments import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.remarks import print_remark

# A compiled step is of this size or larger: a disk with less space is full for what is to be kept.
_PROBE_BYTES = 256 * 2**10
# jax keeps programs that took longer to compile than a limit: none takes so long.
_NEVER_SECONDS = 1e9


def cache_folder(setting: str | None) -> Path | None:
    """Folder of compiled programs for `compilation_cache`: auto, a path, or None.

    `JAXTRAIN_CACHE_DIR` replaces the platform's cache folder under auto.
    """
    if setting is None:
        return None
    if setting != "auto":
        return local_path(setting, what="compilation_cache").expanduser()
    root = os.environ.get("JAXTRAIN_CACHE_DIR")
    if root:
        return local_path(root, what="JAXTRAIN_CACHE_DIR").expanduser() / "compiled"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).expanduser() / "jaxtrain" / "compiled"


def use_cache(setting: str | None) -> None:
    """Let jax keep compiled programs in the folder of `compilation_cache`, which is made if need be.

    Args:
        setting: see `cache_folder`.

    Raises:
        ConfigError: a folder that was asked for cannot be made; where it is that of auto, one line says so.
    """
    import jax

    folder = cache_folder(setting)
    if folder is None:
        return
    try:
        # Compiled programs are run as they are read: nobody else may write there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if setting == "auto" and not os.environ.get("JAXTRAIN_CACHE_DIR"):
            # Nobody chose this folder: a home that is read-only, or not there, is no mistake of the config.
            print_remark(
                f"programs are compiled, but not kept: the compilation cache {folder} cannot be made "
                f"({error.strerror}); set compilation_cache to another folder, or to null"
            )
            return
        raise ConfigError(
            f"cannot make the compilation cache {folder}: {error.strerror}; "
            "set compilation_cache=null or another folder"
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    reason = why_not_writable(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2 if reason is None else _NEVER_SECONDS)
    # One warning for each program that cannot be kept or read again says less than the line of `why_not_writable`.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
    if reason is not None:
        print_remark(
            f"programs are compiled, but not kept: the compilation cache {folder} cannot be written ({reason}); "
            "set compilation_cache=null or another folder"
        )


def why_not_writable(folder: Path) -> str | None:
    """Why no program can be written to a folder of compiled programs; None where one can.

    Args:
        folder: exists.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
