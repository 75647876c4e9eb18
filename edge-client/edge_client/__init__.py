"""The edge client: drafts with a small model here, shows the text that the cloud's large model decided.

`client.EdgeClient` is the library, `__main__` the command line `paceline`.
"""
