from pathlib import Path

from tandem_cli.demo import pools
from tandem_contract.paths import Role
from tandem_operator.resources.pool_files import parse_pools


def test_the_pair_is_one_set_of_one_prefill_and_two_decode_pods(tmp_path: Path) -> None:
    (pool_set,) = parse_pools(pools.pair(tmp_path, 4096))
    assert pool_set.prefill is not None
    assert pool_set.prefill.spec.initial_replicas == 1
    assert [p.spec.initial_replicas for p in pool_set.decodes] == [2]
    assert pool_set.prefill.compat == pool_set.decodes[0].compat


def test_the_single_engine_has_the_settings_of_the_pair(tmp_path: Path) -> None:
    (pair,) = parse_pools(pools.pair(tmp_path, 4096))
    (single,) = parse_pools(pools.single_engine(tmp_path, 4096))
    assert single.prefill is None
    assert single.decodes[0].role is Role.UNIFIED
    assert single.decodes[0].spec.engine == pair.decodes[0].spec.engine
