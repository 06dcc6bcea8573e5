"""Label rows, shared by all replicas: codec, stores, the cache itself, and an embedded server."""

from deploy.label_cache.cache import CachedLabels, LabelCache
from deploy.label_cache.codec import CodecError, LabelRows
from deploy.label_cache.labels import LabelEncodingError
from deploy.label_cache.redis_clients import ConnectionOptions
from deploy.label_cache.redis_store import RedisStore
from deploy.label_cache.server import EmbeddedServer, ServerError
from deploy.label_cache.stats import CacheStats, TierStats
from deploy.label_cache.store import MemoryStore, Store, StoreError

__all__ = [
    "CacheStats",
    "CachedLabels",
    "CodecError",
    "ConnectionOptions",
    "EmbeddedServer",
    "LabelCache",
    "LabelEncodingError",
    "LabelRows",
    "MemoryStore",
    "RedisStore",
    "ServerError",
    "Store",
    "StoreError",
    "TierStats",
]
