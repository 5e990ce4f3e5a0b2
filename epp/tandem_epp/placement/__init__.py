"""One request, from its complete body to its end: placed on pods, counted there, and learned from.

    picker            decides on an answer or on pods, which `choice` chooses; read this first
    preparer          what must be known of the body before that and takes time
    placement         a request that was placed, until it ends
    counted_request   its counts on its pods, whichever replica placed it
    verdicts          what its answer says about the health of its pods
    history           the latest decisions, for `tandem trace`

Errors: `exchange.NotPlaced`.
"""
