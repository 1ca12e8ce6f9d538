// Recurrences on the CPU: tensors to the C interface of recurrent/recurrent.h. Python has checked the shapes.
#include "recurrent/recurrent.h"

#include <optional>
#include <vector>

#include "api/api.h"

namespace seqpar {
namespace {

using Maybe = std::optional<Tensor>;
using Tables = std::vector<Tensor>;  // begin, end, chunk and order of the runs

const int64_t* longs(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Long && x.is_contiguous(), "tables must be contiguous int64");
  return static_cast<const int64_t*>(x.const_data_ptr());
}

// The memory of a dense tensor of one type with v.
void* dense(const Tensor& x, const sp_recurrence& a, const char* name) {
  STD_TORCH_CHECK(x.scalar_type() == (a.wide ? ScalarType::Double : ScalarType::Float) && x.is_contiguous(), name,
                  " must be dense, of v's dtype");
  return x.mutable_data_ptr();
}

void* dense(const Maybe& x, const sp_recurrence& a, const char* name) { return x ? dense(*x, a, name) : nullptr; }

// The memory of a tensor with dense rows, and the stride between them.
const void* rows(const Tensor& x, const sp_recurrence& a, const char* name, int64_t* stride) {
  int64_t inside = 1;
  for (int64_t n = x.dim() - 1; n > 0; --n) {
    STD_TORCH_CHECK(x.numel() == 0 || x.size(n) < 2 || x.stride(n) == inside, name, " must have dense rows");
    inside *= x.size(n);
  }
  STD_TORCH_CHECK(x.scalar_type() == (a.wide ? ScalarType::Double : ScalarType::Float), name, " must be of v's dtype");
  *stride = x.stride(0);
  return x.const_data_ptr();
}

const void* rows(const Maybe& x, const sp_recurrence& a, const char* name, int64_t* stride) {
  return x ? rows(*x, a, name, stride) : nullptr;
}

sp_recurrence described(const Maybe& q, const Tensor& k, const Tensor& v, const Maybe& decay, const Maybe& beta,
                        const Tensor& entering, const Tables& tables, double scale) {
  STD_TORCH_CHECK(tables.size() == 4, "tables must be 4 tensors");
  sp_recurrence a = {};
  a.wide = v.scalar_type() == ScalarType::Double;
  a.decays = !decay ? SP_DECAY_NONE : decay->dim() == 2 ? SP_DECAY_SCALAR : SP_DECAY_CHANNEL;
  a.runs = entering.size(0), a.heads = v.size(1), a.groups = k.size(1), a.dim = k.size(2), a.v_dim = v.size(2);
  a.begin = longs(tables[0]), a.end = longs(tables[1]), a.chunk = longs(tables[2]), a.order = longs(tables[3]);
  a.q = rows(q, a, "q", &a.q_row), a.k = rows(k, a, "k", &a.k_row), a.v = rows(v, a, "v", &a.v_row);
  a.decay = rows(decay, a, "decay", &a.decay_row), a.beta = rows(beta, a, "beta", &a.beta_row);
  a.entering = dense(entering, a, "entering"), a.scale = scale;
  return a;
}

void done(int status) { STD_TORCH_CHECK(status == 0, "seqpar: a recurrence has no memory left for its scratch"); }

void forward(Maybe q, Tensor k, Tensor v, Maybe decay, Maybe beta, Tensor entering, Tables tables, double scale,
             Maybe out, Tensor left, Maybe entered, int64_t isa) {
  const sp_recurrence a = described(q, k, v, decay, beta, entering, tables, scale);
  const sp_recurrent_sums s = {dense(out, a, "out"), dense(left, a, "left"), dense(entered, a, "entered")};
  done(sp_recurrent_forward(&a, &s, static_cast<int>(isa), parallel_for));
}

void backward(Maybe q, Tensor k, Tensor v, Maybe decay, Maybe beta, Tensor entering, Tables tables, double scale,
              Maybe dout, Tensor dleft, Tensor entered, Maybe dq, Tensor dk, Tensor dv, Maybe ddecay, Maybe dbeta,
              Tensor dentering, int64_t isa) {
  const sp_recurrence a = described(q, k, v, decay, beta, entering, tables, scale);
  sp_recurrent_grads g = {};
  g.dout = rows(dout, a, "dout", &g.dout_row), g.dleft = dense(dleft, a, "dleft");
  g.entered = dense(entered, a, "entered");
  g.dq = dense(dq, a, "dq"), g.dk = dense(dk, a, "dk"), g.dv = dense(dv, a, "dv");
  g.ddecay = dense(ddecay, a, "ddecay"), g.dbeta = dense(dbeta, a, "dbeta");
  g.dentering = dense(dentering, a, "dentering");
  done(sp_recurrent_backward(&a, &g, static_cast<int>(isa), parallel_for));
}

}  // namespace
}  // namespace seqpar

STABLE_TORCH_LIBRARY_FRAGMENT(seqpar_native, m) {
  m.def(
      "recurrence_forward(Tensor? q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor entering, "
      "Tensor[] tables, float scale, Tensor(a!)? out, Tensor(b!) left, Tensor(c!)? entered, int isa) -> ()");
  m.def(
      "recurrence_backward(Tensor? q, Tensor k, Tensor v, Tensor? decay, Tensor? beta, Tensor entering, "
      "Tensor[] tables, float scale, Tensor? dout, Tensor dleft, Tensor entered, Tensor(a!)? dq, Tensor(b!) dk, "
      "Tensor(c!) dv, Tensor(d!)? ddecay, Tensor(e!)? dbeta, Tensor(f!) dentering, int isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(seqpar_native, CPU, m) {
  m.impl("recurrence_forward", TORCH_BOX(&seqpar::forward));
  m.impl("recurrence_backward", TORCH_BOX(&seqpar::backward));
}
