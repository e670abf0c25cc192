"""What moves METP's blocks, and how much of it is hidden: `python -m benchmarks.metp_hops`, a minute and a half on four GPUs.

`benchmarks.metp_overlap` under one setting of XLA, CUDA and NCCL after another, each in a process of its own.
"""

import dataclasses
import json

import tyro

from benchmarks import metp, record

_PRIVATE = "--xla_gpu_collective_permute_mode=private"  # XLA's default: NCCL
SETTINGS: dict[str, dict[str, str]] = {
    "copy engines": {},
    "copy engines, any order of starts": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "NCCL": {"XLA_FLAGS": _PRIVATE},
    "NCCL, any order of starts": {"XLA_FLAGS": _PRIVATE, "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "NCCL, 4 channels": {"XLA_FLAGS": f"{_PRIVATE} --xla_gpu_nccl_p2p_max_nchannels=4"},
    "NCCL's copies": {"XLA_FLAGS": _PRIVATE, "NCCL_P2P_USE_CUDA_MEMCPY": "1"},
}


def main(config: metp.Config) -> None:
    base, size, rows = dataclasses.asdict(config), max(config.sizes), []
    simulated = {} if record._accelerator() else {"XLA_FLAGS": f"--xla_force_host_platform_device_count={size}"}
    for name, setting in SETTINGS.items():
        flags = " ".join(filter(None, [setting.get("XLA_FLAGS"), simulated.get("XLA_FLAGS")]))
        case = {**base, "kind": "overlap", "size": size}
        found = record.in_fresh_process("benchmarks.metp", case, environ={**setting, "XLA_FLAGS": flags}, timeout=60)
        rows.append({"setting": name, "environment": setting} | {k: v for k, v in found.items() if k not in base})
        print(json.dumps(rows[-1]), flush=True)
        record.save("metp_hops", rows)


if __name__ == "__main__":
    main(tyro.cli(metp.Config, description=__doc__))
