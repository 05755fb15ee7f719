"""Bugs made by hand in the server and in the engine behind it."""

from tests.bugs.bug import Bug

SERVING = {
    'a text of no tokens is given to the engine': Bug(
        'eval/serve/scheduler.py',
        'deque(i for i in unscored if self.takes_slot(i))\n'
        '        self.to_echo = collections.deque(i for i in unscored if not self.takes_slot(i))\n',
        'deque(unscored)\n        self.to_echo = collections.deque()\n',
        'tests/eval/serve/test_strangers.py -k taken',
    ),
    'an error at one call ends the thread': Bug(
        'eval/serve/scheduler.py',
        '            self._refuse(generation, error)\n\n    def _refuse',
        '            raise\n\n    def _refuse',
        'tests/eval/serve/test_scheduler.py -k one_call',
    ),
    'prompts scored with one that fails fail too': Bug(
        'eval/serve/scheduler.py',
        '            if len(texts) == 1:\n                self._refuse(texts[0][0], error)\n',
        '            if texts:\n                for generation, _ in texts:\n'
        '                    self._refuse(generation, error)\n',
        'tests/eval/serve/test_scheduler.py -k one_call',
    ),
    'rows beside one that fails fail too': Bug(
        'lm/inference/engine.py',
        'if len(rows) == 1:',
        'if rows:',
        'tests/lm/inference/test_engine.py -k one_row',
    ),
    'an engine goes on without its cache': Bug(
        'lm/inference/engine.py',
        '            jax.block_until_ready(self._layers)\n',
        '            pass\n',
        'tests/lm/inference/test_engine.py -k takes_the_cache',
    ),
    'only the first token of a list ends a row': Bug(
        'lm/inference/slots.py',
        'jnp.isin(token_B, ends_E)',
        '(token_B == ends_E[0])',
        'tests/lm/inference/test_engine.py -k listed_tokens',
    ),
    'token 0 ends nothing': Bug(
        'lm/data/tokenizers.py',
        'type(token) is int and token >= 0',
        'type(token) is int and token > 0',
        'tests/eval/serve/test_chat.py -k token_ids',
    ),
    'small answers wait for an acknowledgement': Bug(
        'eval/serve/connections.py',
        'socket.socket(family, socket.SOCK_STREAM, protocol)',
        'socket.socket(family, socket.SOCK_STREAM)',
        'tests/eval/serve/test_connections.py -k at_once',
    ),
    'tojson escapes what is not ASCII': Bug(
        'eval/serve/template_worker.py',
        'to_json(value, ensure_ascii=False',
        'to_json(value, ensure_ascii=True',
        'tests/eval/serve/test_chat.py -k transformers',
    ),
    'prompts wait for chats': Bug(
        'eval/serve/app.py',
        'self._chat_readers if kind is Chat else self._readers',
        'self._readers',
        'tests/eval/serve/test_app.py -k do_not_wait',
    ),
}
