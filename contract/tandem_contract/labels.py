"""Labels on Tandem's pods: the operator writes them, EPPs and selectors read them."""

from typing import Final

GROUP: Final = "tandem.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

POOL: Final = f"{GROUP}/pool"
ROLE: Final = f"{GROUP}/role"
MODEL: Final = f"{GROUP}/model"
REVISION: Final = f"{GROUP}/revision"
KV_COMPAT: Final = f"{GROUP}/kv-compat"
DRAINING: Final = f"{GROUP}/draining"

LLMD_ROLE: Final = "llm-d.ai/role"
"""The same role under llm-d's name, so that its EPP finds our pods."""

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
NAME: Final = "app.kubernetes.io/name"
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"
