"""Streams that go on at another engine after theirs failed.

    rules          which requests can be continued, which generated again, and why the others cannot
    ledger         what a stream has delivered so far, by token ids
    seam           where another engine begins
    transcript     what a stream has delivered that another engine generates again
    repeated       compares and removes what is generated again
    continuation   the request that another engine gets, and its events as parts of the first stream
    kept_stream    one stream as its client sees it, over all engines that serve it

An engine is asked for the ids of its tokens, which are removed again from what the client gets. If
the engine fails, another one gets prompt and delivered tokens as one prompt of ids, so that nothing
is tokenized a second time, and the stream goes on with its tokens. Where that is not exact, another
engine generates the whole answer again, if it is greedy or seeded, and what was sent is removed.
"""
