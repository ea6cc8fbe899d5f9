"""Writes the description of this machine's GPU that XLA's compiler takes, as a target for `jaxtrain plan`.

    python scripts/capture_target.py FOLDER

The description comes from the topology of jax's devices, by names that jaxlib may change. The script has never run on
a card.
"""

import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Write FOLDER/KIND.txtpb."""
    import jax
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  no public name gives a topology's description

    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"jax runs on the {device.platform}: there is no card to describe")
    topology = _jax.get_topology_for_devices(jax.devices())
    text = str(topology.target_config)
    if "gpu_device_info" not in text:
        raise SystemExit(f"the topology gives no description: {text[:200]!r}")
    path = folder / f"{device.device_kind.lower().replace(' ', '_')}.txtpb"
    header = f"# {device.device_kind}, as jax {jax.__version__} describes it on the card\n"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(header + text + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
