"""One engine: requests in, tokens out, one `step()` at a time; and `LLM`, the engine without a
cluster.

`engine.py` composes the rooms: scheduling decides what a step computes, memory owns the KV cache's
blocks, execution runs the model, and sampling turns logits into tokens. This room knows no router,
no HTTP, no Ray and no hand-off. Its caller takes held prompts and reservations from it, and moves
the rows.
"""
