"""Compile the request paths of the EPP and the sidecar to C with mypyc.

    python -m images.hot_path SITE                     the packages in SITE, for images
    python -m images.hot_path SITE --copy-of ROOT      a copy of those of a checkout, for tests
    … --optimize 0                                     in less time, for tests only

Extension modules are written beside the sources, which stay: Python prefers the former. Needs a C
compiler, Python's headers, mypy and setuptools. Without this step the same sources run interpreted.

What mypyc cannot compile, or compiles to something else, stays out of `MODULES`:

- structs that msgspec decodes, because unions in their annotations are lost (`messages`,
  `media_placeholders`, `timing`, `plan`);
- structs whose options matter, such as `eq=False` or the hash of a frozen one: options are lost
  (`events_actions`, `record`, `logs`);
- a class of which an interpreted class inherits, or that inherits from one;
- generic data classes, and data classes with fields that `__init__` does not take;
- a protocol that is checked at run time (`llmd.plugins.plugin_types`);
- classes of exceptions (`body_fields`, `http2.errors`): where two handlers in a function name their
  exceptions alike, that of the second is expected to be of the first one's class;
- a class to which something holds weak references;
- an alias that differs between type checkers and run time (`tandem_contract.chains`).

A compiled function checks the types of its arguments, so it takes no other class that merely looks
the same.
"""

import argparse
import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

import setuptools
from mypyc.build import mypycify

OPTIMIZE: Final = 2
"""Level of the C compiler."""
PACKAGES: Final = (
    "contract/tandem_contract",
    "http1/tandem_http1",
    "planner/tandem_planner",
    "epp/tandem_epp",
    "sidecar/tandem_sidecar",
)
"""The packages that contain or are imported by the modules below."""
MODULES: Final = (
    "tandem_contract.api_paths",
    "tandem_contract.fast_metrics",
    "tandem_contract.held_bytes",
    "tandem_contract.overlaps",
    "tandem_contract.plan_mac",
    "tandem_contract.plan_signer",
    "tandem_contract.plan_verification",
    "tandem_contract.prefix",
    "tandem_contract.request_ids",
    "tandem_contract.request_kinds",
    "tandem_contract.single_engine",
    "tandem_contract.stream_start",
    "tandem_contract.timing_figures",
    "tandem_epp.backends.adapters",
    "tandem_epp.backends.ejections",
    "tandem_epp.backends.fleet",
    "tandem_epp.backends.fleet_figures",
    "tandem_epp.backends.health",
    "tandem_epp.backends.outcomes",
    "tandem_epp.backends.pace",
    "tandem_epp.backends.pairing",
    "tandem_epp.backends.pods",
    "tandem_epp.backends.token_scales",
    "tandem_epp.choice.candidate_layout",
    "tandem_epp.choice.context",
    "tandem_epp.choice.cost_choice",
    "tandem_epp.choice.prompt_tokens",
    "tandem_epp.choice.result",
    "tandem_epp.choice.scheduler",
    "tandem_epp.estimates.answer_lengths",
    "tandem_epp.estimates.busy_period",
    "tandem_epp.estimates.contention",
    "tandem_epp.estimates.cost_record",
    "tandem_epp.estimates.engine_counters",
    "tandem_epp.estimates.exposed_share",
    "tandem_epp.estimates.fabric_fits",
    "tandem_epp.estimates.kinds",
    "tandem_epp.estimates.overheads",
    "tandem_epp.estimates.own_requests",
    "tandem_epp.estimates.pod_estimates",
    "tandem_epp.estimates.prefill_queue",
    "tandem_epp.estimates.prompt_hits",
    "tandem_epp.estimates.request_load",
    "tandem_epp.llmd.metrics.requests",
    "tandem_epp.llmd.plugins.decider",
    "tandem_epp.llmd.plugins.profile",
    "tandem_epp.llmd.plugins.score_choice",
    "tandem_epp.metrics.counters",
    "tandem_epp.metrics.faults",
    "tandem_epp.placement.counted_request",
    "tandem_epp.placement.history",
    "tandem_epp.placement.picker",
    "tandem_epp.placement.placement",
    "tandem_epp.placement.placement_headers",
    "tandem_epp.placement.preparation",
    "tandem_epp.placement.prompt_entries",
    "tandem_epp.placement.verdicts",
    "tandem_epp.prefix.cached_prefixes",
    "tandem_epp.prefix.holder_sets",
    "tandem_epp.prefix.placed_prefixes",
    "tandem_epp.prefix.prefix_tree",
    "tandem_epp.prefix.prefix_walk",
    "tandem_epp.prefix.radix_tree",
    "tandem_epp.prefix.reuse",
    "tandem_epp.prefix.sorted_table",
    "tandem_epp.replicas.shared_fleet",
    "tandem_epp.request.answered_model",
    "tandem_epp.request.bodies",
    "tandem_epp.request.field_types",
    "tandem_epp.request.inference",
    "tandem_epp.request.media",
    "tandem_epp.request.model_rewrites",
    "tandem_epp.request.objectives",
    "tandem_epp.request.prompt_key",
    "tandem_epp.request.tenant_salts",
    "tandem_epp.server.ext_proc.body_deadlines",
    "tandem_epp.server.ext_proc.codec",
    "tandem_epp.server.ext_proc.http2_server",
    "tandem_epp.server.ext_proc.stream",
    "tandem_epp.server.ext_proc.wire_answers",
    "tandem_epp.server.ext_proc.wire_bodies",
    "tandem_epp.server.ext_proc.wire_headers",
    "tandem_epp.server.http2.connection",
    "tandem_epp.server.http2.control",
    "tandem_epp.server.http2.frames",
    "tandem_epp.server.http2.grpc",
    "tandem_epp.server.http2.headers",
    "tandem_epp.server.http2.limits",
    "tandem_epp.server.http2.pieces",
    "tandem_epp.server.http2.sending",
    "tandem_epp.server.http2.server",
    "tandem_epp.server.http2.session",
    "tandem_epp.server.http2.state",
    "tandem_epp.server.http2.stream",
    "tandem_http1.answers",
    "tandem_http1.client",
    "tandem_http1.connection",
    "tandem_http1.framing",
    "tandem_http1.messages",
    "tandem_http1.reader",
    "tandem_http1.server",
    "tandem_http1.tunnel",
    "tandem_http1.upstream",
    "tandem_planner.choice",
    "tandem_planner.cost",
    "tandem_planner.decode_fit",
    "tandem_planner.figure_table",
    "tandem_planner.groups",
    "tandem_planner.learned_cost",
    "tandem_planner.linear_fit",
    "tandem_planner.objective",
    "tandem_planner.pair_search",
    "tandem_planner.pod_costs",
    "tandem_planner.prefill_fit",
    "tandem_planner.sample_window",
    "tandem_planner.transfer",
    "tandem_sidecar.bodies.edit",
    "tandem_sidecar.bodies.kinds",
    "tandem_sidecar.connectors.nixl",
    "tandem_sidecar.connectors.nixl_push",
    "tandem_sidecar.handoff.alternates",
    "tandem_sidecar.handoff.classify",
    "tandem_sidecar.handoff.context",
    "tandem_sidecar.handoff.decoding",
    "tandem_sidecar.handoff.driver",
    "tandem_sidecar.handoff.engine_liveness",
    "tandem_sidecar.handoff.forward",
    "tandem_sidecar.handoff.generation",
    "tandem_sidecar.handoff.liveness",
    "tandem_sidecar.handoff.machine",
    "tandem_sidecar.handoff.outbound",
    "tandem_sidecar.handoff.passthrough",
    "tandem_sidecar.handoff.planned",
    "tandem_sidecar.handoff.prefilling",
    "tandem_sidecar.handoff.proven_prefill",
    "tandem_sidecar.handoff.proxy",
    "tandem_sidecar.handoff.reply",
    "tandem_sidecar.handoff.single_engine",
    "tandem_sidecar.handoff.timing",
    "tandem_sidecar.handoff.token_gaps",
    "tandem_sidecar.handoff.transfer_monitor",
    "tandem_sidecar.observability.observer",
    "tandem_sidecar.resume.continuation",
    "tandem_sidecar.resume.encoded_ids",
    "tandem_sidecar.resume.kept_stream",
    "tandem_sidecar.resume.ledger",
    "tandem_sidecar.resume.plain_events",
    "tandem_sidecar.resume.repeated",
    "tandem_sidecar.resume.rules",
    "tandem_sidecar.resume.seam",
    "tandem_sidecar.resume.whole_events",
    "tandem_sidecar.resume.whole_tokens",
    "tandem_sidecar.security.route",
)
"""The modules through which each request passes (of the EPP: `python -m benchmarks.epp_parts`), and
those that contain classes derived from theirs."""

_COLD: Final = """\
struct _object;
void CPy_AddTraceback(const char *, const char *, int, struct _object *) __attribute__((cold));
"""
"""Each operation has a branch for its exception, which calls this function of mypyc's. As it is
said to be cold, the compiler moves these branches away from the code that runs."""


class CannotCompile(Exception):
    """The modules could not be compiled: the message says why and what to do."""


def compiled_copy(
    root: Path, site: Path, say: Callable[[str], object], optimize: int = OPTIMIZE
) -> None:
    """Have `site` contain the packages of the checkout `root`, compiled; takes no time if it has
    them as they are now. `say`: shows a line of progress. `optimize`: as for `compile_modules`.
    Raises CannotCompile."""
    key, record = f"{_key(root)} {optimize}", site / "key"
    if record.exists() and record.read_text() == key:
        return
    shutil.rmtree(site, ignore_errors=True)
    for package in PACKAGES:
        target = site / Path(package).name
        shutil.copytree(root / package, target, ignore=shutil.ignore_patterns("__pycache__"))
    say("compiling the request paths of EPP and sidecar, in two minutes or more …")
    compile_modules(site, optimize=optimize)
    check_import(site)
    record.write_text(key)


def compile_modules(site: Path, python: str = sys.executable, optimize: int = OPTIMIZE) -> None:
    """Compile `MODULES` of the packages in `site`. `python`: the interpreter, of this version, that
    has the libraries which they import: their types are read. `optimize`: the C compiler's level, 0
    to 3. Raises CannotCompile."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise CannotCompile("no C compiler: install gcc and Python's headers")
    paths = [f"{module.replace('.', '/')}.py" for module in MODULES]
    # Two files of C, which two compilers read at the same time.
    of_sidecar = [p for p in paths if p.startswith(("tandem_http1/", "tandem_sidecar/"))]
    of_epp = [path for path in paths if path not in of_sidecar]
    groups: list[tuple[list[str], str | None]]
    groups = [group for group in ((of_epp, "epp"), (of_sidecar, "sidecar")) if group[0]]
    # `--cache-dir`: mypy's own would be written into the folder.
    flags = ["--ignore-missing-imports", "--python-executable", python, "--cache-dir", os.devnull]
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(site):
        command = ["--quiet", "build_ext", "--inplace", "--parallel", "2"]
        command += ["--build-temp", scratch, "--build-lib", scratch]
        # mypyc's warnings name lines that could be faster still: of interest only beside an error.
        messages = io.StringIO()
        try:
            # Without the symbols of debuggers, so that equal sources give equal files.
            with contextlib.redirect_stdout(messages), contextlib.redirect_stderr(messages):
                modules = mypycify(
                    [*flags, *paths],
                    opt_level=str(optimize),
                    debug_level="0",
                    target_dir=scratch,
                    separate=groups,
                )
            for module in modules:
                module.extra_compile_args += _compiler_flags(Path(scratch))
            setuptools.setup(name="hot-path", packages=[], ext_modules=modules, script_args=command)
        except SystemExit as err:
            sys.stderr.write(messages.getvalue())
            raise CannotCompile(f"mypyc or the C compiler failed, see above: {err}") from err


def _compiler_flags(scratch: Path) -> list[str]:
    """What makes the code smaller and its calls direct, together an eighth of a request's time, and
    what makes the compiler faster. `scratch`: an empty folder."""
    header = scratch / "cold.h"
    header.write_text(_COLD)
    # Python's own flags ask for all warnings. They take two thirds of the time without optimizing,
    # and of generated code they say nothing that one could mend.
    return ["-include", str(header), "-fno-plt", "-fno-semantic-interposition", "-Wno-all"]


def check_import(site: Path, python: str = sys.executable) -> None:
    """Import EPP and sidecar from `site`: some errors, such as an interpreted class derived from a
    compiled one, show only then. Raises CannotCompile."""
    environment = os.environ | {"PYTHONPATH": str(site.resolve())}
    command = [python, "-c", "import tandem_epp.main, tandem_sidecar.main"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:]
        raise CannotCompile(f"the compiled modules cannot be imported: {' '.join(last)}")


def _key(root: Path) -> str:
    """What the compiled modules depend on."""
    key = hashlib.sha256(f"{sys.version} {version('mypy')}".encode())
    for source in (
        Path(__file__),
        *(f for p in PACKAGES for f in sorted((root / p).rglob("*.py"))),
    ):
        key.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return key.hexdigest()


def main() -> int:
    """Exit status: 0, or 1 with a line on stderr when the modules cannot be compiled."""
    parser = argparse.ArgumentParser(prog="python -m images.hot_path", description=__doc__)
    parser.add_argument("site", type=Path, help="folder with the packages")
    parser.add_argument("--copy-of", type=Path, metavar="ROOT", help="first copy this checkout's")
    parser.add_argument("--python", default=sys.executable, help="interpreter with the libraries")
    parser.add_argument("--optimize", type=int, choices=range(4), default=OPTIMIZE)
    arguments = parser.parse_args()
    try:
        if arguments.copy_of is not None:
            root = arguments.copy_of.resolve()
            compiled_copy(root, arguments.site, print, arguments.optimize)
        else:
            compile_modules(arguments.site, arguments.python, arguments.optimize)
            check_import(arguments.site, arguments.python)
    except CannotCompile as err:
        sys.stderr.write(f"images.hot_path: {err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
