"""Sends an answer, whole or streamed, to a client that may leave, read slowly, or wait."""

import asyncio
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from eval.serve.refusal import Refusal
from eval.serve.replies import Reply, error_body, format_event
from eval.serve.scheduler import Chunk, Scheduler

BACKLOG = 64  # chunks of each text that wait for a slow client before it is disconnected


class ClientLeft(Exception):
    """The client has left, or was disconnected."""


class Answer:
    """The response of an endpoint.

    It queues a generation, sends its chunks, and cancels it as soon as the client is gone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        reply: Reply,
        timeout_sec: float,
        active_answers: set['Answer'],
        abort: Callable[[Scope], None],
    ):
        """Args:
        scheduler: does the work.
        reply: turns chunks into records.
        timeout_sec: time limit from now to the end of the answer.
        active_answers: the running answers; the new answer adds and removes itself.
        abort: cuts the connection of a client.
        """
        self._scheduler, self._reply, self._active_answers, self._abort = (
            scheduler,
            reply,
            active_answers,
            abort,
        )
        self._generation, self._timeout_sec = reply.generation, timeout_sec
        self._deadline = asyncio.get_running_loop().time() + timeout_sec
        # Used by the event loop's thread alone. None wakes `_next_chunk` when the client leaves.
        self._inbox: asyncio.Queue[Chunk | Refusal | None] = asyncio.Queue()
        self._has_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        # The scheduler's thread delivers chunks; an asyncio queue is not safe across threads.
        run_in_loop = asyncio.get_running_loop().call_soon_threadsafe
        self._scheduler.submit(self._generation, lambda message: run_in_loop(self.put, message))
        self._active_answers.add(self)
        watch_task = asyncio.create_task(self._watch_disconnect(receive))
        try:
            if self._reply.body.stream:
                await self._send_stream(send)
            else:
                await self._send_whole(scope, receive, send)
        except ClientLeft:
            pass
        finally:
            # After an error too: otherwise slots would generate text that nobody reads.
            watch_task.cancel()
            self._active_answers.discard(self)
            self._scheduler.cancel(self._generation)

    def put(self, message: Chunk | Refusal) -> None:
        """Queues a chunk or refusal for the client.

        Disconnects a client that reads too slowly, so that its slots are free at once.
        """
        if self._has_left:
            return
        if self._inbox.qsize() < BACKLOG * len(self._generation.rows):
            self._inbox.put_nowait(message)
        else:
            self._scheduler.cancel(self._generation)
            self._abort(self._scope)

    async def _watch_disconnect(self, receive: Receive) -> None:
        while (await receive())['type'] != 'http.disconnect':
            pass
        self._scheduler.cancel(self._generation)
        self._has_left = True
        self._inbox.put_nowait(None)

    async def _next_chunk(self) -> Chunk:
        """Returns the next chunk. Raises the Refusal that ends the texts, or ClientLeft."""
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._inbox.get()
        except TimeoutError:
            is_started = self._generation.is_started
            raise Refusal(
                504,
                'generation_timeout' if is_started else 'queue_timeout',
                f'the answer was not complete within {self._timeout_sec:g} seconds'
                if is_started
                else f'no slot was free within {self._timeout_sec:g} seconds',
            ) from None
        if self._has_left:
            raise ClientLeft
        if isinstance(message, Refusal):
            raise message
        assert message is not None  # None only wakes this method when the client has left
        return message

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks, n_running = [], len(self._generation.rows)
        while n_running:
            chunks.append(await self._next_chunk())
            n_running -= bool(chunks[-1].finish)
        await JSONResponse(self._reply.build_response(chunks))(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        chunk = await self._next_chunk()  # until here a refusal can still set the HTTP status
        headers = [
            (b'content-type', b'text/event-stream; charset=utf-8'),
            (b'cache-control', b'no-cache'),
            (b'x-accel-buffering', b'no'),  # nginx would otherwise hold back the stream
        ]
        await send({'type': 'http.response.start', 'status': 200, 'headers': headers})

        async def write(*records, more_body: bool = True) -> None:
            body = b''.join(map(format_event, records))
            # A chunk may have no record, for example an incomplete UTF-8 character.
            if body or not more_body:
                await send({'type': 'http.response.body', 'body': body, 'more_body': more_body})

        try:
            n_running = len(self._generation.rows)
            while True:
                await write(*self._reply.stream_records(chunk))
                n_running -= bool(chunk.finish)
                if not n_running:
                    break
                chunk = await self._next_chunk()
            await write(*self._reply.final_records())
        except Refusal as refusal:
            # Status 200 is sent already; the error becomes an event of the stream.
            await write(error_body(refusal))
        await write('[DONE]', more_body=False)
