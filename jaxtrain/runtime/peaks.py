"""Dense peaks of accelerators, the denominator of model FLOPs utilization.

One row per device as JAX counts devices: a TPU v2 or v3 chip and a TPU7x chip are two devices each, the others one.
Figures are the vendors', dense (half of what NVIDIA prints "with sparsity"), at boost clocks, with fp32 accumulation.
"""

_TERA = 1e12


# TFLOP/s by number format.
_H100_SXM = dict(fp32=67.0, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9)
_A100 = dict(fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0)

# Keys are `device.device_kind`, which for NVIDIA is the product name that nvidia-smi prints.
# A format the hardware lacks, or without a published figure, is left out.
_PEAKS: dict[str, dict[str, float]] = {
    # NVIDIA Tesla V100 datasheet (2018): fp32 15.7 (SXM2), 14 (PCIe); tensor 125, 112. No bf16, no tf32.
    "Tesla V100-SXM2-16GB": dict(fp32=15.7, fp16=125.0),
    "Tesla V100-SXM2-32GB": dict(fp32=15.7, fp16=125.0),
    "Tesla V100-PCIE-16GB": dict(fp32=14.0, fp16=112.0),
    "Tesla V100-PCIE-32GB": dict(fp32=14.0, fp16=112.0),
    # NVIDIA T4 datasheet (2018): fp32 8.1, mixed precision 65. No bf16, no tf32.
    "Tesla T4": dict(fp32=8.1, fp16=65.0),
    # NVIDIA A100 datasheet (2021); the figures are the same for every form and memory size.
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    # NVIDIA A10 datasheet (2021).
    "NVIDIA A10": dict(fp32=31.2, tf32=62.5, bf16=125.0, fp16=125.0),
    # NVIDIA A10G datasheet (published by AWS for g5 instances).
    "NVIDIA A10G": dict(fp32=35.0, tf32=35.0, bf16=70.0, fp16=70.0),
    # NVIDIA L4 datasheet (2023): 120 and 242 with sparsity.
    "NVIDIA L4": dict(fp32=30.3, tf32=60.0, bf16=121.0, fp16=121.0, fp8=242.5),
    # NVIDIA L40S datasheet (2023).
    "NVIDIA L40S": dict(fp32=91.6, tf32=183.0, bf16=362.05, fp16=362.05, fp8=733.0),
    # NVIDIA H100 datasheet (2023) and Hopper architecture whitepaper, table 2 (989.4 and 494.7 dense).
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    # NVIDIA H100 datasheet (2023), PCIe column: tf32 756 and bf16 1513 with sparsity; fp32 51.
    "NVIDIA H100 PCIe": dict(fp32=51.0, tf32=378.0, bf16=756.5, fp16=756.5, fp8=1513.0),
    # NVIDIA H100 datasheet (2024), NVL column: fp32 60, tf32 835 and bf16 1671 with sparsity.
    "NVIDIA H100 NVL": dict(fp32=60.0, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1670.5),
    # NVIDIA H200 datasheet (2024), SXM column, and GH200 datasheet (2023): the compute of the H100 SXM.
    "NVIDIA H200": _H100_SXM,
    "NVIDIA GH200 480GB": _H100_SXM,
    # NVIDIA GB200 NVL72 and HGX B200 specification tables (2025), one GPU: 4.5 and 5 PFLOP/s with sparsity.
    "NVIDIA B200": dict(fp32=75.0, tf32=1100.0, bf16=2250.0, fp16=2250.0, fp8=4500.0),
    "NVIDIA GB200": dict(fp32=80.0, tf32=1250.0, bf16=2500.0, fp16=2500.0, fp8=5000.0),
    # NVIDIA Ada architecture whitepaper (2022), appendix A: tensor figures with fp32 accumulation.
    "NVIDIA GeForce RTX 4090": dict(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3),
    # NVIDIA Ampere GA102 architecture whitepaper (2021), appendix A: tensor figures with fp32 accumulation.
    "NVIDIA GeForce RTX 3090": dict(fp32=35.6, tf32=35.6, bf16=71.0, fp16=71.0),
    # Google Cloud TPU documentation, system architecture: 180 TFLOP/s a v2 board of 4 chips, 123 a v3 chip, of two
    # devices each. TPUs multiply in bf16; fp32 is emulated by several passes and has no published peak.
    "TPU v2": dict(bf16=22.5),
    "TPU v3": dict(bf16=61.5),
    # Same source: 275 a chip, which is one device.
    "TPU v4": dict(bf16=275.0),
    # Same source: v5e 197.
    "TPU v5 lite": dict(bf16=197.0),
    "TPU v5e": dict(bf16=197.0),
    # Same source: v5p 459.
    "TPU v5": dict(bf16=459.0),
    "TPU v5p": dict(bf16=459.0),
    # Same source: v6e (Trillium) 918.
    "TPU v6 lite": dict(bf16=918.0),
    "TPU v6e": dict(bf16=918.0),
    # Same source: TPU7x (Ironwood) 2307 per chip; each of its two chiplets is a device.
    "TPU7x": dict(bf16=1153.5),
}

# Precision policy -> number format of its matmuls: under fp8 those of linear layers, which are most of the FLOPs.
FORMATS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16_pure": "bf16", "fp16": "fp16", "fp8": "fp8"}


def peak_flops(device_kind: str, policy: str) -> float | None:
    """The dense peak of one device in the number format of a precision policy.

    Under fp8 all FLOPs are compared with the fp8 peak, also those of attention and of the output layer, which run in
    bf16: the convention of published fp8 figures, and a lower utilization than the same step time would be of a mix.
    Where the device has no fp8 units the policy runs in bf16, and that is its peak.

    Args:
        device_kind: `device.device_kind`.
        policy: a precision policy; `bf16_pure` counts as bf16.

    Returns:
        FLOP/s, or None where the device (CPUs among them) or its figure for this format is not known.
    """
    peaks = _PEAKS.get(device_kind, {})
    tera = peaks.get(FORMATS.get(policy, ""))
    if tera is None and policy == "fp8":
        tera = peaks.get("bf16")
    return None if tera is None else tera * _TERA
