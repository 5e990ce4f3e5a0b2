"""What a request's body says, as far as the choice of pods depends on it. Pure, but for the process
that reads large bodies.

    bodies          which bodies are read, and how: by the path, as JSON or as a form
    inference       model, prompt and what rules out a split, of a request that generates
    pooled          the same of embeddings, classes and scores
    prompt_key      the bytes whose hashes say which prompts share KV; `media` in them
    large_bodies    reads large ones in another process, `body_worker`
    model_rewrites  replaces the model that is named; `answered_model` puts it back

Errors: `body_fields.BadBody`, for the client: what is wrong and where. Read `inference` first.
"""
