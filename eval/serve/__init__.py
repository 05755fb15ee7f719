"""A server of completions: a checkpoint behind the HTTP interface of OpenAI's clients.

Called by `python -m eval.serve` and tests. Calls eval.load and lm.inference. Of the extra `serve`,
only requests.py imports pydantic, and only answers.py, app.py and connections.py import starlette
and uvicorn.
"""
