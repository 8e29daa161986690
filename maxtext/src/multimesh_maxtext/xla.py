"""XLA's flags for what the command line asks of the compiler."""

from __future__ import annotations

from multimesh_maxtext.options import Options

_SWITCHES = {
    "collective_matmul": (
        "--xla_gpu_threshold_for_windowed_einsum_mib=0",
        "--xla_gpu_multi_streamed_windowed_einsum=true",
    ),
    "latency_hiding_scheduler": ("--xla_gpu_enable_latency_hiding_scheduler=true",),
    "xla_pipelining": (
        "--xla_gpu_enable_pipelined_all_reduce=true",
        "--xla_gpu_enable_pipelined_all_gather=true",
        "--xla_gpu_enable_pipelined_reduce_scatter=true",
    ),
    "xla_loop_buffering": ("--xla_gpu_enable_while_loop_double_buffering=true",),
    "use_nccl_comm_split": ("--xla_gpu_enable_nccl_comm_splitting=true",),
}
_THRESHOLDS = {
    "xla_ar_threshold": "--xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_ag_threshold": "--xla_gpu_all_gather_combine_threshold_bytes",
    "xla_rs_threshold": "--xla_gpu_reduce_scatter_combine_threshold_bytes",
}


def xla_flags(options: Options, *, devices: int) -> list[str]:
    """Return the flags for ``XLA_FLAGS``.

    Parameters
    ----------
    devices
        Devices of this process; on the CPU platform XLA makes so many of the host.
    """
    flags: list[str] = []
    if options.platform == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    else:
        for name, switches in _SWITCHES.items():
            flags += switches if getattr(options, name) else ()
        for name, flag in _THRESHOLDS.items():
            value = getattr(options, name)
            flags += [f"{flag}={value}"] if value is not None else []
    # The programs of a pipeline are many: only where they are asked for, beside the plan.
    if options.dump and (options.hlo or options.dump_all_passes or not options.staged):
        folder = options.dump.resolve() / "xla" if options.staged else options.dump.resolve()
        flags.append(f'--xla_dump_to="{folder}"')
        flags += ["--xla_dump_hlo_as_text=true"] if options.hlo else []
        flags += ["--xla_dump_hlo_pass_re=.*"] if options.dump_all_passes else []
    return flags
