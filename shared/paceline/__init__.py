"""Paceline: exact text of a large model at the pace of a small one on the edge.

`ls` of this folder is the architecture; docs/architecture.md is the map. Pure modules (wire, subjects, keys,
coupling, trie, session, drafting) import no client library; `nats`, `redis` and `llama_cpp` are each imported
by one module.
"""
