"""Which pod has which part of a prompt: the approximate index, and the precise one.

    prefix_tree     approximate: remembers the prompts of all pods, in a `radix_tree`: those under
                    way (`placed_prefixes`) and those that were answered (`cached_prefixes`)
    pod_blocks      precise: the blocks of all pods as their KV events tell, by `block_keys`
    kv_events/      the events themselves, over ZMQ
    tokenization/   token ids of prompts, by which the precise index is asked

What a choice does with it belongs to `choice`. Read `prefix_tree` first.
"""
