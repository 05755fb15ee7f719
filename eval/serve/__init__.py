"""A server of completions: a checkpoint behind the HTTP interface that OpenAI's clients speak.

Called by `python -m eval.serve` and tests. Calls eval.load and lm.inference; of the extra `serve`
pydantic in requests.py, starlette and uvicorn in answers.py, app.py and connections.py alone.
"""
