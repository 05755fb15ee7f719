"""One answer as it is sent: whole or streamed, to a client that may leave, read slowly, or wait."""

import asyncio
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from eval.serve.replies import Reply, error, event
from eval.serve.requests import Refusal
from eval.serve.scheduler import Call, Piece, Scheduler

BACKLOG = 64  # pieces of each text that wait for a slow reader, before it is dropped


class Gone(Exception):
    """The client has left, or was dropped."""


class Inbox:
    """Pieces that wait for one client, in the thread of the event loop.

    most: how many may wait. too_slow: called when more would.
    """

    def __init__(self, most: int, too_slow: Callable[[], None]):
        self._most, self._too_slow = most, too_slow
        self._items: asyncio.Queue[Piece | Refusal] = asyncio.Queue()
        self._is_gone = False

    def put(self, item: Piece | Refusal) -> None:
        if self._is_gone:
            return
        if self._items.qsize() == self._most:
            self._too_slow()
        if self._items.qsize() < self._most:
            self._items.put_nowait(item)

    def leave(self) -> None:
        """Ends the waiting: nobody reads any more."""
        self._is_gone = True
        self._items.put_nowait(closed_inbox())

    async def get(self, deadline: float) -> Piece:
        """Returns the next piece.

        Raises:
          Refusal: where one ends the call.
          Gone: where the client has left.
          TimeoutError: behind the deadline, in seconds of the event loop.
        """
        async with asyncio.timeout_at(deadline):
            item = await self._items.get()
        if self._is_gone:
            raise Gone
        if isinstance(item, Refusal):
            raise item
        return item


class Answer:
    """The response of an endpoint: lets the call wait, sends what comes of it, and gives it up as
    soon as nobody waits for it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        reply: Reply,
        timeout_sec: float,
        listed: set['Answer'],
        abort: Callable[[Scope], None],
    ):
        """Args:
        scheduler: does the work.
        reply: makes records of pieces.
        timeout_sec: from now to the end of the answer.
        listed: holds the answers that are under way.
        abort: cuts the connection of a client.
        """
        self._scheduler, self._reply, self._listed, self._abort = scheduler, reply, listed, abort
        self._timeout_sec = timeout_sec
        self._deadline = asyncio.get_running_loop().time() + timeout_sec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        works = [one.work for one in self._reply.wanted]
        self.inbox = Inbox(BACKLOG * len(works), lambda: self._drop(scope))
        in_loop = asyncio.get_running_loop().call_soon_threadsafe
        self._call = Call(works, lambda item: in_loop(self.inbox.put, item))
        self._scheduler.submit(self._call)
        self._listed.add(self)
        watching = asyncio.create_task(self._watch(receive))
        try:
            if self._reply.asked.stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        except Gone:
            pass
        finally:
            watching.cancel()
            self._listed.discard(self)
            self._scheduler.cancel(self._call)

    def _drop(self, scope: Scope) -> None:
        """Cuts a client off that reads too slowly; its slots are free at once."""
        self._scheduler.cancel(self._call)
        self._abort(scope)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())['type'] != 'http.disconnect':
            pass
        self._scheduler.cancel(self._call)
        self.inbox.leave()

    async def _next(self) -> Piece:
        try:
            return await self.inbox.get(self._deadline)
        except TimeoutError:
            is_started = self._call.is_started
            raise Refusal(
                504,
                'generation_timeout' if is_started else 'queue_timeout',
                f'the answer was not complete within {self._timeout_sec:g} seconds'
                if is_started
                else f'no slot was free within {self._timeout_sec:g} seconds',
            ) from None

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces, left = [], len(self._call.works)
        while left:
            pieces.append(await self._next())
            left -= bool(pieces[-1].finish)
        await JSONResponse(self._reply.whole(pieces))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        piece = await self._next()  # a refusal until here has a status of its own
        headers = [
            (b'content-type', b'text/event-stream; charset=utf-8'),
            (b'cache-control', b'no-cache'),
            (b'x-accel-buffering', b'no'),
        ]
        await send({'type': 'http.response.start', 'status': 200, 'headers': headers})

        async def write(*records, more: bool = True) -> None:
            body = b''.join(map(event, records))
            if body or not more:
                await send({'type': 'http.response.body', 'body': body, 'more_body': more})

        try:
            left = len(self._call.works)
            while True:
                await write(*self._reply.chunks(piece))
                left -= bool(piece.finish)
                if not left:
                    break
                piece = await self._next()
            await write(*self._reply.last_chunks())
        except Refusal as refusal:
            await write(error(refusal))
        await write('[DONE]', more=False)


def closed_inbox() -> Refusal:
    """Returns what wakes a reader that nobody waits for."""
    return Refusal(499, 'client_closed', 'the client has left')
