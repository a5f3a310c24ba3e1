"""Variants of docs/folder_connector.py. Each variant has one planted fault. Only StoresNothing breaks no rule."""

import sys
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from folder_connector import FolderConnector as FolderConnector
from folder_connector import Transfers


def lose(connector):
    for file in connector.folder.iterdir():
        file.unlink()


class CountsQuestions(FolderConnector):  # it promises 0 tokens if vLLM looks up a request again
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        asked = self.__dict__.setdefault("asked", set())
        if request.request_id in asked:
            return 0, False
        asked.add(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(self, request, block_ids):
        self.__dict__.setdefault("asked", set()).discard(request.request_id)
        return super().request_finished(request, block_ids)


class PromisesComputed(FolderConnector):  # its promise includes tokens that vLLM has computed
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tokens, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return tokens + num_computed_tokens * between_steps, between_steps


class HidesFailedLoads(FolderConnector):  # it reports no failed load
    def get_block_ids_with_load_errors(self):
        return set()


class StoresAhead(FolderConnector):  # it stores a block when vLLM has computed the block's first token
    def build_connector_meta(self, scheduler_output):
        loads, self.loads = self.loads, {}
        meta = Transfers(loads)
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            request, blocks = self.requests[name], self._kv_cache_manager.get_block_ids(name)[0]
            begun = -(-(request.num_computed_tokens + tokens) // self.size)
            pairs = list(zip(self.files(request), blocks, strict=False))[:begun]
            meta.stores += pairs[self.stored.get(name, request.num_computed_tokens // self.size) :]
            self.stored[name] = len(pairs)
        return meta


class KeepsEnded(FolderConnector):  # it never removes the state of an ended request
    def request_finished(self, request, block_ids):
        return False, None


class ResetsNothing(FolderConnector):  # its reset does nothing and reports success
    def reset_cache(self):
        return True


class ForgetsAborted(FolderConnector):  # it takes two steps for a load, and forgets the load of a request that ends
    def get_finished(self, finished_req_ids):
        waiting = self.__dict__.setdefault("waiting", deque([set(), set()]))
        waiting.append(super().get_finished(finished_req_ids)[1])
        for names in waiting:
            names -= finished_req_ids
        return None, waiting.popleft()


class TakesFirstBlocks(FolderConnector):  # it still uses the blocks that a request had before its preemption
    def build_connector_meta(self, scheduler_output):
        meta = super().build_connector_meta(scheduler_output)
        first = self.__dict__.setdefault("first", {})
        renamed = {}
        for name in scheduler_output.num_scheduled_tokens:
            blocks = self._kv_cache_manager.get_block_ids(name)[0]
            had = first.setdefault(name, list(blocks))
            had += blocks[len(had) :]
            renamed |= dict(zip(blocks, had, strict=False))
        return Transfers(meta.loads, [(file, renamed.get(block, block)) for file, block in meta.stores])

    def request_finished(self, request, block_ids):
        self.__dict__.setdefault("first", {}).pop(request.request_id, None)
        return super().request_finished(request, block_ids)


class ReportsTwice(FolderConnector):  # it reports received requests again in the next step
    def get_finished(self, finished_req_ids):
        _, received = super().get_finished(finished_req_ids)
        again, self.again = self.__dict__.get("again", set()), received
        return None, received | again


class LeavesOutALayer(FolderConnector):  # it stores and loads the first layer only
    def register_kv_caches(self, kv_caches):
        self.kv_caches = dict(list(kv_caches.items())[:1])


class StoresNothing(FolderConnector):  # it breaks no rule, but no load can be tested
    def wait_for_save(self): ...


class ChangesTheOutput(FolderConnector):  # it removes ended requests from the scheduler's output
    def build_connector_meta(self, scheduler_output):
        meta = super().build_connector_meta(scheduler_output)
        scheduler_output.finished_req_ids = set()
        return meta


class HandsOutRequests(FolderConnector):  # its metadata has vLLM's requests, which no other process can read
    def build_connector_meta(self, scheduler_output):
        meta = super().build_connector_meta(scheduler_output)
        meta.requests = list(self.requests.values())
        return meta
