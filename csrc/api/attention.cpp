// Attention on the CPU: tensors to the C interface of attention/attention.h. Python has checked the shapes.
#include "attention/attention.h"

#include <optional>
#include <vector>

#include "api/api.h"
#include "base/isa.h"

namespace seqpar {
namespace {

using Tables = std::vector<Tensor>;  // see `facts` in the schema

const int32_t* ints(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && x.is_contiguous(), name, " must be contiguous int32");
  return static_cast<const int32_t*>(x.const_data_ptr());
}

const int64_t* longs(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Long && x.is_contiguous(), name, " must be contiguous int64");
  return static_cast<const int64_t*>(x.const_data_ptr());
}

float* floats(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, " must be float32");
  return static_cast<float*>(x.mutable_data_ptr());
}

void dense(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.size(2) < 2 || x.stride(2) == 1, name, " must have a dense last dim");
}

sp_attention described(const Tensor& q, const Tensor& k, const Tensor& v, const Tables& facts, double scale,
                       double softcap, const std::optional<Tensor>& slopes, double dropout_p,
                       const std::optional<Tensor>& drop_a, const std::optional<Tensor>& drop_b, int64_t bm) {
  STD_TORCH_CHECK(facts.size() == 6 || facts.size() == 7, "facts must be 6 tensors, or 7 if keys end");
  STD_TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), "q, k, v differ in dtype");
  for (const Tensor* x : {&q, &k, &v}) dense(*x, "q, k and v");
  sp_attention a = {};
  a.dtype = q.scalar_type() == ScalarType::BFloat16 ? SP_BF16 : SP_F32;
  STD_TORCH_CHECK(a.dtype == SP_BF16 || q.scalar_type() == ScalarType::Float, "dtype must be float32 or bfloat16");
  a.m = q.size(0), a.n = k.size(0), a.heads = q.size(1), a.kv_heads = k.size(1), a.dim = q.size(2), a.v_dim = v.size(2);
  a.q = q.const_data_ptr(), a.k = k.const_data_ptr(), a.v = v.const_data_ptr();
  a.q_row = q.stride(0), a.q_head = q.stride(1);
  a.k_row = k.stride(0), a.k_head = k.stride(1);
  a.v_row = v.stride(0), a.v_head = v.stride(1);
  a.pos = ints(facts[0], "pos"), a.lo = ints(facts[1], "lo"), a.hi = ints(facts[2], "hi");
  a.key_pos = ints(facts[3], "key_pos");
  if (facts.size() == 7) a.until = ints(facts[6], "until");
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap);
  if (slopes) a.slopes = floats(*slopes, "slopes");
  a.dropout_p = dropout_p;
  if (drop_a) a.drop_a = ints(*drop_a, "drop_a");
  if (drop_b) a.drop_b = ints(*drop_b, "drop_b");
  a.tiles = {facts[5].size(0), bm, longs(facts[4], "rows"), longs(facts[5], "order")};
  return a;
}

// The best instruction set of this machine, numbered as in base/isa.h.
int64_t isa() { return sp_isa(); }

// Whether facts may say where keys end: an extension that was built earlier lacks the operator.
bool has_until() { return true; }

std::tuple<int64_t, int64_t> tile(int64_t isa, bool bf16) {
  int64_t bm = 0, bn = 0;
  sp_attention_tile(isa, bf16 ? SP_BF16 : SP_F32, &bm, &bn);
  return {bm, bn};
}

void done(int status, const sp_attention& a) {
  STD_TORCH_CHECK(status != SP_NO_MEMORY, "seqpar: attention has no memory left for its scratch");
  STD_TORCH_CHECK(status == 0, "seqpar: attention does not support ", a.heads, " query and ", a.kv_heads,
                  " key heads of dims ", a.dim, " and ", a.v_dim, " in tiles of ", a.tiles.bm, " rows");
}

void compute(const Tensor& q, const Tensor& k, const Tensor& v, const Tables& facts, double scale, double softcap,
             const std::optional<Tensor>& slopes, double dropout_p, const std::optional<Tensor>& drop_a,
             const std::optional<Tensor>& drop_b, int64_t bm, const std::optional<Tensor>& acc, const Tensor& lse,
             const std::optional<Tensor>& out, bool first, int64_t isa, const Tensor* top) {
  const sp_attention a = described(q, k, v, facts, scale, softcap, slopes, dropout_p, drop_a, drop_b, bm);
  sp_sums s = {};
  if (acc) {
    dense(*acc, "acc");
    s.acc = floats(*acc, "acc"), s.acc_row = acc->stride(0), s.acc_head = acc->stride(1);
  }
  STD_TORCH_CHECK(a.m < 2 || lse.stride(1) == 1, "lse must be dense in its rows");
  s.lse = floats(lse, "lse"), s.lse_head = lse.stride(0);
  if (out) {
    dense(*out, "out");
    STD_TORCH_CHECK(out->scalar_type() == q.scalar_type(), "out must have q's dtype");
    s.out = out->mutable_data_ptr(), s.out_row = out->stride(0), s.out_head = out->stride(1);
  }
  s.first = first;
  if (top != nullptr) {
    STD_TORCH_CHECK(a.m < 2 || top->stride(1) == 1, "top must be dense in its rows");
    s.top = floats(*top, "top"), s.top_head = top->stride(0);
  }
  done(sp_attention_forward(&a, &s, isa, parallel_for), a);
}

void forward(Tensor q, Tensor k, Tensor v, Tables facts, double scale, double softcap, std::optional<Tensor> slopes,
             double dropout_p, std::optional<Tensor> drop_a, std::optional<Tensor> drop_b, int64_t bm,
             std::optional<Tensor> acc, Tensor lse, std::optional<Tensor> out, bool first, int64_t isa) {
  compute(q, k, v, facts, scale, softcap, slopes, dropout_p, drop_a, drop_b, bm, acc, lse, out, first, isa, nullptr);
}

void forward_top(Tensor q, Tensor k, Tensor v, Tables facts, double scale, double softcap, std::optional<Tensor> slopes,
                 double dropout_p, std::optional<Tensor> drop_a, std::optional<Tensor> drop_b, int64_t bm,
                 std::optional<Tensor> acc, Tensor lse, std::optional<Tensor> out, bool first, int64_t isa,
                 Tensor top) {
  compute(q, k, v, facts, scale, softcap, slopes, dropout_p, drop_a, drop_b, bm, acc, lse, out, first, isa, &top);
}

void backward(Tensor q, Tensor k, Tensor v, Tables facts, double scale, double softcap, std::optional<Tensor> slopes,
              double dropout_p, std::optional<Tensor> drop_a, std::optional<Tensor> drop_b, int64_t bm, Tensor dout,
              Tensor lse, Tensor delta, Tensor dq, Tensor dk, Tensor dv, int64_t isa) {
  const sp_attention a = described(q, k, v, facts, scale, softcap, slopes, dropout_p, drop_a, drop_b, bm);
  for (const Tensor* x : {&dout, &dq, &dk, &dv}) dense(*x, "dout, dq, dk and dv");
  STD_TORCH_CHECK(dout.scalar_type() == q.scalar_type(), "dout must have q's dtype");
  STD_TORCH_CHECK(a.m < 2 || (lse.stride(1) == 1 && delta.stride(1) == 1), "lse and delta must be dense in their rows");
  sp_grads g = {};
  g.dout = dout.const_data_ptr(), g.dout_row = dout.stride(0), g.dout_head = dout.stride(1);
  g.lse = floats(lse, "lse"), g.lse_head = lse.stride(0);
  g.delta = floats(delta, "delta"), g.delta_head = delta.stride(0);
  g.dq = floats(dq, "dq"), g.dq_row = dq.stride(0), g.dq_head = dq.stride(1);
  g.dk = floats(dk, "dk"), g.dk_row = dk.stride(0), g.dk_head = dk.stride(1);
  g.dv = floats(dv, "dv"), g.dv_row = dv.stride(0), g.dv_head = dv.stride(1);
  done(sp_attention_backward(&a, &g, isa, parallel_for), a);
}

}  // namespace
}  // namespace seqpar

// facts: pos, lo, hi, key_pos int32; rows and order of the query tiles int64; until int32 if keys end.
STABLE_TORCH_LIBRARY_FRAGMENT(seqpar_native, m) {
  m.def("isa() -> int");
  m.def("attention_has_until() -> bool");
  m.def("attention_tile(int isa, bool bf16) -> (int, int)");
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor[] facts, float scale, float softcap, Tensor? slopes, "
      "float dropout_p, Tensor? drop_a, Tensor? drop_b, int bm, Tensor(a!)? acc, Tensor(b!) lse, "
      "Tensor(c!)? out, bool first, int isa) -> ()");
  // a second operator: an extension that was built earlier lacks it, and still computes
  m.def(
      "attention_forward_top(Tensor q, Tensor k, Tensor v, Tensor[] facts, float scale, float softcap, Tensor? slopes, "
      "float dropout_p, Tensor? drop_a, Tensor? drop_b, int bm, Tensor(a!)? acc, Tensor(b!) lse, "
      "Tensor(c!)? out, bool first, int isa, Tensor(d!) top) -> ()");
  m.def(
      "attention_backward(Tensor q, Tensor k, Tensor v, Tensor[] facts, float scale, float softcap, Tensor? slopes, "
      "float dropout_p, Tensor? drop_a, Tensor? drop_b, int bm, Tensor dout, Tensor lse, Tensor delta, "
      "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, int isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(seqpar_native, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&seqpar::isa));
  m.impl("attention_has_until", TORCH_BOX(&seqpar::has_until));
  m.impl("attention_tile", TORCH_BOX(&seqpar::tile));
}

STABLE_TORCH_LIBRARY_IMPL(seqpar_native, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&seqpar::forward));
  m.impl("attention_forward_top", TORCH_BOX(&seqpar::forward_top));
  m.impl("attention_backward", TORCH_BOX(&seqpar::backward));
}
