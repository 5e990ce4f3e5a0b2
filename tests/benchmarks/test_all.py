"""`python -m benchmarks` runs what writes figures, and nothing else."""

from benchmarks.__main__ import HERE, OPT_IN, SUPPORT


def test_every_module_is_a_benchmark_or_named_as_something_else() -> None:
    names = {path.stem for path in HERE.glob("*.py")}
    assert names >= SUPPORT | OPT_IN
    run = names - SUPPORT - OPT_IN
    sources = {name: (HERE / f"{name}.py").read_text() for name in run}
    # Each is started with `--json`, and has to write that file.
    assert not [name for name, source in sources.items() if '"--json"' not in source]
