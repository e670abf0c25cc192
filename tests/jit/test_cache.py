"""What `memjax.jit` keeps on disk: the next process plans and compiles nothing that it finds there."""

import jax
import jax.numpy as jnp

import memjax
from tests.jit.steps import OPTIONS, STEPS, WIDTH, held, within
from tests.jit.test_jit import close, copied


def test_what_is_on_disk_is_not_done_again(count, tmp_path):
    step = STEPS["layers"]()
    scaled = lambda scale: lambda *args: step.f(*args[:-1], scale * args[-1])
    one, other = (scaled(jnp.linspace(0.5, last, WIDTH)) for last in (1.0, 2.0))
    budget = within(0.6, step)
    new = lambda f=one, **more: memjax.jit(f, budget=budget, cache_dir=tmp_path, **step.options, **more)

    def compiled(jitted):
        count.clear()
        assert jitted.plan(*step.args) == plan
        return len(count)

    count.clear()
    plan = new().plan(*step.args)
    first = len(count)
    ([file], [program]) = (list(tmp_path.glob(f"*.{kind}")) for kind in ("json", "program"))
    again, with_others = new(), new(other)
    assert compiled(again) == 0
    close(again(*copied(step.args)), jax.jit(one)(*step.args))
    assert held(again.lower(*step.args).compile(OPTIONS)) == plan.nbytes
    # Equations are the same, and constants are not.
    assert compiled(with_others) == 1
    close(with_others(*copied(step.args)), jax.jit(other)(*step.args))
    program.write_bytes(program.read_bytes()[:1000])
    assert compiled(new()) == 1
    for text in (file.read_text().replace('"program": "', '"program": "of another version'), "damaged"):
        file.write_text(text)
        program.unlink(missing_ok=True)
        assert compiled(new()) == first
    assert new(keep_unused=True).plan(*step.args).nbytes <= budget
    assert len(list(tmp_path.glob("*.json"))) == 2
