"""What moves METP's blocks, and how much of it is hidden: `python -m benchmarks.metp_hops`, two minutes.

`benchmarks.cases.metp_overlap` under one setting of XLA, CUDA and NCCL after another, each in a process of its own. With
`--sizes 2 --steps 8` two GPUs stand in for a ring of eight.
"""

import dataclasses
import json

import tyro

from benchmarks import metp, record

_NCCL = "--xla_gpu_collective_permute_mode=private"  # XLA's default
SETTINGS: dict[str, dict[str, str]] = {
    "copy engines, as `hide_hops` sets them": {},
    "a hop for every array": {"XLA_FLAGS": "--xla_gpu_collective_permute_combine_threshold_bytes=0"},
    "sums beside matmuls that XLA makes": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"},
    "any order of starts": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "NCCL": {"XLA_FLAGS": _NCCL},
    "NCCL, any order of starts": {"XLA_FLAGS": _NCCL, "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
}


def main(config: metp.Config) -> None:
    base, size, rows = dataclasses.asdict(config), max(config.sizes), []
    simulated = {} if record._accelerator() else {"XLA_FLAGS": f"--xla_force_host_platform_device_count={size}"}
    for name, setting in SETTINGS.items():
        flags = " ".join(filter(None, [setting.get("XLA_FLAGS"), simulated.get("XLA_FLAGS")]))
        case = {**base, "kind": "overlap", "size": size}
        result = record.in_fresh_process("benchmarks.metp", case, environ={**setting, "XLA_FLAGS": flags}, timeout=60)
        measured = {k: v for k, v in result.items() if k not in base or k == "steps"}
        rows.append({"setting": name, "environment": setting} | measured)
        print(json.dumps(rows[-1]), flush=True)
        record.save("metp_hops", rows)


if __name__ == "__main__":
    main(tyro.cli(metp.Config, description=__doc__))
