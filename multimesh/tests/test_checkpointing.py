"""`jax.checkpoint` inside tasks, around them, around losses and around loops, with every kind of policy."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from models import MLP, mlp_block, squared_error
from pipelines import Split, both, submeshes

ROWS, SIZE = 8, 2
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
}
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["kept"],
    offload_src="device",
    offload_dst="pinned_host",
)


def named_block(p, x):
    return checkpoint_name(mlp_block(p, x), "kept")


def loss_of(stage, block):
    def loss(params, batch):
        x = stage(0, block)(params["stages"][0], batch["x"])
        return stage(1, lambda p, x, y: squared_error(block(p, x), y))(params["stages"][1], x, batch["y"])

    return loss


@pytest.mark.telling("names-inside")
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_inside_a_task(policy, where):
    block = jax.checkpoint(named_block, policy=POLICIES[policy])

    def make(stage, microbatch):
        loss = loss_of(stage, block)
        if where == "inside":
            return microbatch(jax.value_and_grad(loss), size=SIZE, argnum=1)
        return jax.value_and_grad(microbatch(loss, size=SIZE, argnum=1))

    both(make, MLP.init(2), MLP.batch(ROWS, 0))


def test_what_a_scan_offloads_to_the_host_waits_there_for_its_backward():
    # The backward reads the named value: it is the factor of x.
    block = jax.checkpoint(lambda x, p: (x * named_block(p, x), None), policy=OFFLOAD)

    def layers(p, x):
        return lax.scan(block, x, jax.tree.map(lambda w: jnp.stack([w, w]), p))[0]

    def make(stage, microbatch):
        return microbatch(jax.value_and_grad(loss_of(stage, layers)), size=SIZE, argnum=1)

    both(make, MLP.init(2), MLP.batch(ROWS, 0))


AROUND = POLICIES | {"full": None, "offload": OFFLOAD}


@pytest.mark.telling("names", "offload")
@pytest.mark.parametrize("policy", AROUND)
def test_checkpoint_around_a_microbatch_loop(policy):
    def make(stage, microbatch):
        loop = microbatch(loss_of(stage, named_block), size=SIZE, argnum=1)
        return jax.value_and_grad(jax.checkpoint(loop, policy=AROUND[policy]))

    both(make, MLP.init(2), MLP.batch(ROWS, 0))


def test_a_loss_of_which_a_stage_reads_a_row_goes_forward_again():
    """The gradient of a row is one of zeros around it, which are made after the loop; the forward pass stays in it."""
    weights, rows = [MLP.init(2)["stages"][0]["up"][:4, :4] * (s + 1) for s in range(4)], jnp.ones((ROWS, 4))

    def make(stage, microbatch):
        def bend(x):
            return jnp.where(x > 2, x - 2, x)

        def loss(w, x):
            for s in range(4):
                x = stage(s, (lambda w, x: bend(x + w[0])) if s == 2 else (lambda w, x: bend(x @ w)))(w[s], x)
            return x.sum()

        return jax.grad(microbatch(jax.checkpoint(loss), size=SIZE, argnum=1))

    both(make, weights, rows, split=Split(submeshes(2, (1,)), placement=(0, 1, 1, 0)), schedule="zb-v")


@pytest.mark.skipif("jax_remat3" not in jax.config.values, reason="this JAX has one way to recompute")
def test_checkpoint_in_the_new_way_to_recompute():
    def make(stage, microbatch):
        def loss(p, x):
            h = stage(0, jax.checkpoint(mlp_block))(p[0], x)
            return jnp.mean(stage(1, jax.checkpoint(mlp_block))(p[1], h))

        return microbatch(jax.value_and_grad(loss), size=SIZE, argnum=1)

    jax.config.update("jax_remat3", True)
    try:
        both(make, MLP.init(2)["stages"], MLP.batch(ROWS, 0)["x"])
    finally:
        jax.config.update("jax_remat3", False)


@pytest.mark.telling("zb-h1", "None")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", None])
def test_checkpoint_around_the_last_of_several_stages(schedule):
    """Values of other submeshes that the recomputation waits for are no operands of its kernel."""

    def make(stage, microbatch):
        def loss(params, batch):
            def last(x):
                return stage(2, mlp_block)(params["stages"][2], stage(1, mlp_block)(params["stages"][1], x))

            x = stage(0, mlp_block)(params["stages"][0], batch["x"])
            return stage(2, squared_error)(jax.checkpoint(last)(x), batch["y"])

        both_of = jax.value_and_grad(loss)
        return both_of if schedule is None else microbatch(both_of, size=SIZE, argnum=1)

    both(make, MLP.init(3), MLP.batch(ROWS, 0), split=Split(submeshes(3)), schedule=schedule)
