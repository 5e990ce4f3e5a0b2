"""The channel between the replicas of an EPP: each tells all others what it places and learns.

    frames       the protocol: events, frames and their order; read this first
    outbox       events that wait for one peer, bounded; the snapshot
    inbox        frames of one peer: order and idempotence
    dialer       a connection to one peer: handshake, sending, reconnecting
    listener     connections from peers: handshake, receiving
    channel      all connections of this replica: discovery, start and stop
    metrics      what is counted

Here belongs how events travel. What they mean for the fleet does not: `shared_fleet` makes and
applies them.

`tandem_contract.peer_handshake` is the mutual authentication by the plan keys, and the MAC of each
message.

Errors, after each of which the connection is closed and the dialer reconnects:

    PeerRejected        the peer has other keys or another version, or a message is not authentic
    PeerError
      PeerGone          the connection ended, or the peer was silent for too long
"""
