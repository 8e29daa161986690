"""What the command line of ``maxtext/run.py`` asked for, with the type of every flag."""

from __future__ import annotations

import argparse
from pathlib import Path


class Options(argparse.Namespace):
    """The parsed flags; ``None`` means "not given" wherever the default depends on other flags or on the model."""

    # processes and devices
    nodes: int
    gpus: int
    cpus: int | None
    spawn: bool
    # parallelism
    dp: int
    fsdp: int
    tp: int
    pp: int
    ep: int
    interleave: int
    sequence_parallel: bool
    # training loop
    num_steps: int
    batch_size: int | None
    microbatch_size: int
    schedule: str | None
    custom_schedule_path: Path | None
    seed: int
    # backend
    backend: str
    # model
    maxtext_config: Path | None
    model_name: str | None
    num_layers: int | None
    model_dims: int | None
    mlp_dims: int | None
    num_heads: int | None
    sequence_length: int
    attention: str
    attention_type: str | None
    remat: str
    scan_layers: bool | None
    use_iota_embed: bool
    logits_dot_in_fp32: bool
    load_balance_decoder_norm: bool
    settings: list[str]
    # data
    text: list[Path] | None
    use_tfds_dataset: bool
    dataset_path: str | None
    dataset_name: str | None
    tokenizer_path: str | None
    # outputs
    output: Path | None
    metrics_file: Path | None
    dry_run: bool
    json: bool
    verify: bool
    profile: bool
    # checkpoints and evaluation
    checkpoint: Path | None
    checkpoint_every: int | None
    resume: bool
    eval_every: int | None
    eval_steps: int | None
    # memory and runtime
    forecast: bool
    device_memory: str | None
    fbmem: int | None
    zcmem: int | None
    sysmem: int | None
    eager: list[str]
    network: str | None
    # XLA
    collective_matmul: bool
    latency_hiding_scheduler: bool
    xla_pipelining: bool
    xla_loop_buffering: bool
    xla_ar_threshold: int | None
    xla_ag_threshold: int | None
    xla_rs_threshold: int | None
    hoist_loop_convert: bool
    use_nccl_comm_split: bool
    debug_nccl: bool
    # dumps
    dump: Path | None
    dump_only: bool
    dump_mpmd_passes: bool
    dump_all_passes: bool
    hlo: bool
    debug: str
    # compiler options of MultiMesh
    autoshard: bool
    replicate_small_params: bool
    fuse_tasks: bool
    only_fuse_loop_tasks: bool
    host_offload_min_reuse_distance: int | None

    def has(self, name: str) -> bool:
        """Say whether a flag without a default was given; 0 is a value."""
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def domains(self) -> int:
        """Number of tensor-parallel domains that hold different rows of the batch: dp x fsdp x ep."""
        return self.dp * self.fsdp * self.ep

    @property
    def parallelism(self) -> int:
        """Number of devices that the parallelism flags ask for: dp x fsdp x tp x pp x ep."""
        return self.domains * self.tp * self.pp

    @property
    def staged(self) -> bool:
        """Whether stages are programs of their own; one stage is MaxText as it is, whatever the backend."""
        return self.backend == "multimesh" and self.pp > 1

    @property
    def platform(self) -> str:
        """``"gpu"`` where the devices are GPUs, else ``"cpu"``."""
        return "gpu" if self.gpus else "cpu"
