"""One fuzzing process: `python -m tests.fuzz.process TARGET LIBFUZZER-ARGUMENT…`."""

import sys

import atheris

with atheris.instrument_imports(
    include=[
        "tandem_contract",
        "tandem_epp",
        "tandem_http1",
        "tandem_kvstore",
        "tandem_sidecar",
        "hpack",
    ]
):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv[1]]
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
