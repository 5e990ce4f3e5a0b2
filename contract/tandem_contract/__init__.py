"""Names, formats and rules that two Tandem components must agree on, each defined once.

Contents:

    names on the wire     headers, labels, ports, metrics, endpoints (HTTP paths), environment
    requests              request_kinds, api_grammar (what differs between the APIs), request_ids,
                          single_engine (when not to split), prefix, chat_templates
    hand-off              paths (routing paths), plan (signed decision), transfer_params,
                          concurrent_params, timing, connectors, fabric_classes
    configuration         config (router file), custom_resources, documents (YAML with line
                          numbers), durations, commandline
    for people            trace (`tandem trace`), openai_errors, otlp
    within a process      fast_metrics (counters that cost little)

The package makes no routing decision, opens no socket and reads no clock, but for a chat
template that asks for the date. It imports no other Tandem package. Read `headers` first, then
`transfer_params`.
"""
