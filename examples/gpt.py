"""A GPT in Flax NNX, trained on this repository's documentation: as a pipeline, or as one program.

    python examples/gpt.py                        # 4 stages x 2 data-parallel devices, virtual ones on a laptop
    python examples/gpt.py --stages 1             # plain jax.jit on 2 devices, with the same losses
    python examples/gpt.py --save gpt --steps 20  # twice: the second run goes on where the first one ended
    for i in 0 1; do python examples/gpt.py --processes 2 --process $i & done; wait

It needs `multimesh`, `flax` and `optax`. The model, its loss and the optimizer know nothing of pipelines: the one line
that makes one is `mm.pipeline(loss_of, meshes)`.
"""

import argparse
import csv
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

TEXT = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
VOCAB, LENGTH, WIDTH, HEADS, DROPOUT = 256, 32, 32, 4, 0.1  # a token is a byte
BATCH, MICRO = 32, 4  # rows of a step, and of a microbatch
COLUMNS = ("loss", "gradient", "evaluation")


# 1. The model, as its author wrote it. Dropout takes its key in the call, so that parameters are all that it holds.
class Block(nnx.Module):
    """A transformer layer: attention, then two matrices, with norms before and dropout after each."""

    def __init__(self, rngs):
        self.before, self.between = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT)

    def __call__(self, x, rngs):
        """From ``[rows, length, width]`` to the same; without ``rngs`` nothing is dropped."""
        still = {"deterministic": rngs is None, "rngs": rngs}
        attended = self.attention(self.before(x), mask=nnx.make_causal_mask(x[..., 0]))
        x = x + self.dropout(attended, **still)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.between(x)))), **still)


class GPT(nnx.Module):
    """Layers between an embedding and the same embedding."""

    def __init__(self, layers, rngs):
        self.embed, self.place = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, rngs=None):
        """From ``[rows, length]`` to logits ``[rows, length, vocabulary]``."""
        x = self.embed(tokens) + self.place(np.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x, rngs)
        return self.embed.attend(self.norm(x))


def functions(layers, meshes):
    """New parameters and state, a step of training, and the loss of a batch; one program if there are no meshes."""
    graph, params = nnx.split(GPT(layers, nnx.Rngs(0)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))

    def loss_of(params, batch, key=None, number=0):
        rngs = None if key is None else nnx.Rngs(jax.random.fold_in(key, number))
        logits = nnx.merge(graph, params)(batch["x"], rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    # 2. Pipelines: the function is cut where stages are even, and runs on a few rows at a time.
    loss = mm.pipeline(loss_of, meshes)
    loop = {"size": MICRO, "argnum": 1, "reduce": "mean"}
    gradients = mm.microbatch(jax.value_and_grad(loss), schedule="1f1b", index="number", **loop)

    def step(params, state, batch, key):
        value, grads = gradients(params, batch, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.global_norm(grads)

    # 3. Without meshes nothing in `step` is a task, and mm.jit is jax.jit.
    evaluate = mm.jit(mm.microbatch(loss, schedule="wavefront", **loop))
    return (params, optimizer.init(params)), mm.jit(step, donate_argnums=(0, 1)), evaluate, loss


def batches(text, seed):
    """Rows of text without end, the same ones from any number of a step on."""

    def at(number):
        starts = np.random.default_rng((seed, number)).integers(0, len(text) - LENGTH - 1, BATCH)
        rows = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
        return {"x": rows[:, :-1], "y": rows[:, 1:]}

    return at


class Metrics:
    """Rows of a CSV file, and of TensorBoard if tensorboardX is installed; only process 0 writes any."""

    def __init__(self, folder, first):
        self.table, self.board = None, None
        if folder is None or jax.process_index():
            return
        self.table = Path(folder, "metrics.csv")
        if not first:
            self.table.parent.mkdir(parents=True, exist_ok=True)
            self.table.write_text(",".join(("step", *COLUMNS)) + "\n")
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return
        self.board = SummaryWriter(folder)

    def add(self, number, **values):
        """Write the values of a step, and print them."""
        if not jax.process_index():
            texts = (f"{name} {values[name]:.6f}" for name in COLUMNS if name in values)
            print(f"step {number}: {', '.join(texts)}", flush=True)
        if self.table:
            with open(self.table, "a", newline="") as file:
                csv.writer(file).writerow((number, *(values.get(name, "") for name in COLUMNS)))
        for name, value in values.items() if self.board else ():
            self.board.add_scalar(name, value, number)


def main():
    """Train, and evaluate every few steps."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--stages", type=int, default=4, help="of the pipeline; 1: one program (default: %(default)s)")
    flags.add_argument("--data", type=int, default=2, help="devices that share a batch (default: %(default)s)")
    flags.add_argument("--layers", type=int, default=8, help="of the model (default: %(default)s)")
    flags.add_argument("--steps", type=int, default=10, help="how many (default: %(default)s)")
    flags.add_argument("--every", type=int, default=5, help="steps between evaluations (default: %(default)s)")
    flags.add_argument("--save", metavar="FOLDER", help="for metrics and checkpoints; go on from what is there")
    flags.add_argument("--processes", type=int, default=1, help="how many there are (default: %(default)s)")
    flags.add_argument("--process", type=int, default=0, help="which one this is (default: %(default)s)")
    flags.add_argument("--coordinator", default="localhost:6000", help="where process 0 listens (default: %(default)s)")
    args = flags.parse_args()

    # 4. Devices: virtual ones, so that it runs anywhere; with accelerators delete the first line. Each row of the grid
    #    is a submesh, which is a stage with data parallelism.
    mm.virtual_devices(max(1, args.stages * args.data // args.processes))
    if args.processes > 1:
        mm.distributed.initialize(args.coordinator, args.processes, args.process)
    grid = np.array(jax.devices()[: args.stages * args.data]).reshape(args.stages, args.data)
    meshes = [Mesh(row, ("data",)) for row in grid]
    (params, state), step, evaluate, loss = functions(args.layers, meshes if args.stages > 1 else None)

    # 5. Data: the first nine tenths are for training. The first stage reads tokens, the last one what follows each.
    text = np.frombuffer("".join(path.read_text() for path in TEXT).encode(), np.uint8)
    cut = len(text) * 9 // 10
    train, test = batches(text[:cut], 0), batches(text[cut:], 1)
    rows = {"x": NamedSharding(meshes[0], P("data")), "y": NamedSharding(meshes[-1], P("data"))}

    # 6. Go on from the newest checkpoint. A leaf without a place is moved to its stage by the first step.
    first = 0
    if args.save and any(Path(args.save).glob("step-*")):
        like = {"params": params, "state": state, "step": 0}
        saved = mm.distributed.restore(args.save, like)
        params, state, first = saved["params"], saved["state"], saved["step"]

    if args.stages > 1 and not jax.process_index():
        print(loss.cuts(params, jax.tree.map(lambda x: x[:MICRO], train(0)), jax.random.key(0)))
    metrics = Metrics(args.save, first)
    for number in range(first, args.steps):
        key = jax.random.fold_in(jax.random.key(1), number)
        params, state, value, norm = step(params, state, jax.device_put(train(number), rows), key)
        values = {"loss": value, "gradient": norm}
        last = number + 1 == args.steps
        if last or (number + 1) % args.every == 0:
            values["evaluation"] = evaluate(params, jax.device_put(test(0), rows))
        metrics.add(number, **mm.distributed.gather(values))  # every process asks, since a loss lies on the last stage
        if last and args.save:
            mm.distributed.save(
                f"{args.save}/step-{args.steps}", {"params": params, "state": state, "step": number + 1}
            )


if __name__ == "__main__":
    main()
