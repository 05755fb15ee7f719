"""A server of completions: a checkpoint behind the HTTP interface that OpenAI's clients speak.

Called by `python -m eval.serve` and tests. Calls eval.load and lm.inference; starlette and uvicorn
(the extra `serve`) in answers.py, app.py and connections.py alone.
"""
