"""`tandem store`: a plain HTTP store for KV tensors, on one machine's disk."""
