"""The page at `/`: a chat with the model and the state of the cluster, in a browser.

Its files are served as they are. They call this server's own endpoints (`/v1/models`,
`/v1/chat/completions`, `/metrics`) as any client does, so nothing here knows of requests, workers
or keys. Used by `router.http.app`. See docs/use/page.md.
"""
