"""The running operator: kopf, cache, work queue, reconcilers, writes and leader election.

    kopf_session, feeds   kopf's sessions: logins, lists, watches and handlers
    watches               what is watched, and what of it goes into the cache
    bodies, store, cache  the cluster as last seen, indexed by set and by endpoint
    queue, controller     keys to reconcile, and the workers that reconcile them
    reconcilers           observe → plan (pure) → apply → write status
    cluster, write_errors reads and writes of the API server, and what a refused write means
    storage_probe         what engines say of their external store, for StorageReachable
    kv_transport_probe    KV byte counters of the engines, for the condition TransportVerified
    crd_check, leader, metrics

All I/O of this package is here and in `main`. Read `reconcilers` first, then `cluster`, `cache`,
`controller`.
"""
