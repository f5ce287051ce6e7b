"""Documents packed into windows on a GPU: each as if alone, and none hears of another."""

import pytest
import torch

from models.configs import MIXER_CONFIGS
from models.documents import Documents
from models.lm import build_model
from tests.models.small_models import CONFIGS, VOCAB, relative_rms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEQ_LEN = 96
CU_SEQLENS = torch.tensor([0, 5, 70, 71, 96, 192, 260, 288])
NAMES = [
    *(f"{name}-pure" for name in MIXER_CONFIGS),
    "deltanet-window_hybrid",
    "gated_linear-channel",
    "routed-cler-paper",
]


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_equal_themselves_alone(name, is_bf16):
    model = build_model(CONFIGS[name], VOCAB, torch.Generator().manual_seed(0), "cuda")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (3, SEQ_LEN), generator=generator).cuda()
    documents = Documents.of(CU_SEQLENS, SEQ_LEN, "cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=is_bf16):
        packed = model.hidden(tokens, documents).flatten(0, 1)
        parts = tokens.flatten().tensor_split(CU_SEQLENS[1:-1])
        alone = torch.cat([model.hidden(part[None])[0] for part in parts])
        changed = tokens.flatten().clone()
        changed[71:96] = (changed[71:96] + 1) % VOCAB
        other = model.hidden(changed.view(3, SEQ_LEN), documents).flatten(0, 1)
    assert relative_rms(packed.float().detach(), alone.float().detach()) < (
        2e-2 if is_bf16 else 1e-4
    )
    assert torch.equal(packed[:71], other[:71])
    assert torch.equal(packed[96:], other[96:])
    packed.float().square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
