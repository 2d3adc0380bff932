import pytest, time
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.score import ScoringSequence
import random
pytestmark = pytest.mark.engine
def batch(seed=0):
    d = random.Random(seed)
    return [ScoringSequence(prompt_token_ids=tuple(d.randrange(2,512) for _ in range(p)), response_token_ids=tuple(d.randrange(2,512) for _ in range(r)), response_mask=(True,)*r) for p,r in ((5,9),(3,14),(11,6),(4,0))]
@pytest.mark.parametrize("which", ["llama_engines","qwen3_engines"])
def test_try(which, request):
    e = request.getfixturevalue(which)
    caps = {}
    for role, eng in e.engines.items():
        t=time.time(); eng.score(batch()); t1=time.time()
        caps[role] = eng.trace(batch()); print(role, "score", t1-t, "trace", time.time()-t1)
        print(caps[role].left_out, caps[role].evidence)
    a, b = caps[PolicyRole.ROLLOUT], caps[PolicyRole.TRAINING]
    print([m.semantic for m in a.modules]==[m.semantic for m in b.modules])
    bm = {m.semantic:m for m in b.modules}
    for m in a.modules:
        o = bm.get(m.semantic)
        if o is None: print(m.semantic, "missing"); continue
        pairs = [(x,y) for s,t in zip(m.sequences,o.sequences) for x,y in zip(s.digests,t.digests)]
        print(m.semantic, m.dtype, o.dtype, m.width, o.width, sum(x==y for x,y in pairs), "of", len(pairs), max(max(s.largest,default=0) for s in m.sequences))
