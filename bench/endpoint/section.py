"""The endpoint section: agents' calls against vLLM's own server and against encoding every prompt whole."""

import msgspec

from bench.endpoint.encoding import EncodingSettings, encoding_figures
from bench.endpoint.gateway import GatewaySettings, gateway_figures
from bench.section import BenchSection


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about three minutes on two quiet cores."""

    gateway: GatewaySettings = GatewaySettings()
    encoding: EncodingSettings = EncodingSettings()


QUICK_ENDPOINT = EndpointSettings(
    gateway=GatewaySettings(contexts=(1500, 3000), rounds=1, calls=6),
    encoding=EncodingSettings(calls=10, turn_tokens=100, answer_tokens=50),
)
"""Shows that everything runs. Its figures mean nothing. Most of its minute goes into booting two engines."""

ENDPOINT = BenchSection(
    "endpoint",
    {
        "encoding": lambda bench: encoding_figures(bench.settings.encoding),
        "gateway": lambda bench: gateway_figures(bench.settings.gateway, bench.folder),
    },
    EndpointSettings(),
    QUICK_ENDPOINT,
)
