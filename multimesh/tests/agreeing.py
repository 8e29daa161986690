"""A script in which processes agree and gather, text that test_distributed.py runs in each of them."""

AGREE = """
import jax.numpy as jnp
from multimesh.plan import fingerprint
assert (job.launcher, job.rank, job.mode) == ("arguments", rank, "one process per device"), job
mm.distributed.agree_on("words", ["the", "same"])

def grads(w, x):
    def loss(w, x):
        x = mm.task(jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=POLICY), "first", mesh=meshes[0])(w, x)
        return mm.task(lambda x: (x**2).sum(), "second", mesh=meshes[1])(x)
    return mm.microbatch(jax.grad(loss), argnum=1, size=2)(w, x)

POLICY = jax.checkpoint_policies.save_only_these_names("a", "b", "c")
meshes = [jax.sharding.Mesh(np.array([d]), "x") for d in jax.devices()[:2]]
plan = mm.jit(grads).plan(np.ones((4, 4), np.float32), np.ones((8, 4), np.float32))
mm.distributed.agree_on("plan", fingerprint.lines(plan))

mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
at = lambda *spec: jax.sharding.NamedSharding(mesh, jax.P(*spec))
def array(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
table = np.arange(12, dtype=np.float32).reshape(4, 3)
far = jax.sharding.SingleDeviceSharding(jax.devices()[1])
shards = [jax.device_put(table, d) for d in far.device_set if d.process_index == rank]
tree = {
    "rows": array(table, at("x")), "all": array(table, at()), "there": jax.make_array_from_single_device_arrays(
        table.shape, far, shards, dtype=table.dtype), "number": 3, "here": jnp.arange(2), "numpy": table, "none": None,
    "half": array(table.astype(jnp.bfloat16), at("x")), "empty": array(table[:0], at("x")),
    "scalar": array(np.float32(5).reshape(()), at()), "key": jax.random.key(7),
}
for _ in range(2):
    gathered = mm.distributed.gather(tree)
    for name in ("rows", "all", "there", "numpy", "half", "empty"):
        expected = table[:0] if name == "empty" else table
        assert type(gathered[name]) is np.ndarray and gathered[name].dtype == tree[name].dtype, name
        np.testing.assert_array_equal(gathered[name].astype(np.float32), expected)
    assert [gathered[name] for name in ("number", "scalar", "none")] == [3, 5, None] and gathered["here"].sum() == 1
    assert jax.random.key_data(gathered["key"]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
try:
    mm.distributed.gather(array(np.zeros((count, (18 << 20) // count), np.float32), at("x")))
except mm.UsageError as error:
    assert "75,497,472 bytes" in str(error), error
else:
    raise AssertionError("too large")
if rank:
    time.sleep(LATE)
print("the end", flush=True)
"""
