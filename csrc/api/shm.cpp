// `ShmEnd` as operators. Python knows an end by its number; the end's tensors outlive it.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "api/api.h"
#include "shm/end.h"

namespace seqpar {

namespace {

using Ints = std::vector<int64_t>;

// never destroyed: tensors and ends may outlive the interpreter
Numbered<ShmEnd>& ends() {
  static auto& all = *new Numbered<ShmEnd>("shared memory");
  return all;
}

std::shared_ptr<ShmEnd> end(int64_t number) { return ends().at(number); }

View view(const Tensor& x) {
  View result{static_cast<char*>(x.data_ptr()), static_cast<int64_t>(x.element_size()), {}, {}};
  // an offer holds fewer dims: the caller only passes such a tensor if it is contiguous
  if (x.dim() > SP_DIMS) return {result.data, result.item, {x.numel()}, {1}};
  for (int64_t i = 0; i < x.dim(); ++i) {
    result.sizes.push_back(x.size(i));
    result.strides.push_back(x.stride(i));
  }
  return result;
}

const int64_t* header(const Ints& words) {
  STD_TORCH_CHECK(words.size() == kHeader, "seqpar: a header of ", words.size(), " words, expected ", kHeader);
  return words.data();
}

int64_t open(int64_t rank, int64_t size, int64_t pool_bytes) {
  return ends().add(std::make_shared<ShmEnd>(static_cast<int>(rank), static_cast<int>(size), pool_bytes));
}

void close(int64_t number) { ends().remove(number); }

Ints address(int64_t number) {
  Address at = end(number)->address();
  return {at.process, at.mailbox_file, at.pool_file, at.pool_bytes, at.nonce};
}

void map(int64_t number, int64_t peer, Ints at) {
  end(number)->map(static_cast<int>(peer), {at[0], at[1], at[2], at[3], at[4]});
}

void ready(int64_t number) { end(number)->open(); }

std::optional<Tensor> empty(int64_t number, Ints sizes, ScalarType dtype, int64_t item, bool spare) {
  std::shared_ptr<SharedPool> pool = end(number)->pool();
  Ints strides(sizes.size());
  int64_t count = 1, stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    STD_TORCH_CHECK(sizes[i] >= 0, "empty: dim ", i, " has ", sizes[i], " elements");
    strides[i] = stride;
    const int64_t most = std::max<int64_t>(sizes[i], 1);  // as torch computes strides of empty tensors
    STD_TORCH_CHECK(!__builtin_mul_overflow(stride, most, &stride), "empty: more elements than 64 bits count");
    count *= sizes[i];
  }
  STD_TORCH_CHECK(stride <= INT64_MAX / item, "empty: more bytes than 64 bits count");
  int64_t offset = pool->take(count * item, spare);
  if (offset < 0) return std::nullopt;
  auto give_back = [pool, offset](void*) { pool->give(offset); };
  torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(pool->memory.data() + offset, sizes, strides, cpu, dtype, give_back);
}

bool owns(int64_t number, Tensor x) { return end(number)->owns(view(x)); }

int64_t used(int64_t number) { return end(number)->pool()->used(); }

bool credit(int64_t number, int64_t peer, Ints words, Tensor target) {
  return end(number)->credit(static_cast<int>(peer), header(words), view(target));
}

int64_t push(int64_t number, int64_t peer, Ints words, Tensor source) {
  return static_cast<int64_t>(end(number)->push(static_cast<int>(peer), header(words), view(source), parallel_for));
}

Ints offered(int64_t number, int64_t peer) {
  const Offer* offer = end(number)->mailbox().offered(static_cast<int>(peer));
  return offer ? Ints(offer->header, offer->header + kHeader) : Ints();
}

// For memory outside this end's pool: the caller vouches for the destination.
bool offer(int64_t number, int64_t peer, Ints words, int64_t where, Ints strides) {
  STD_TORCH_CHECK(strides.size() <= SP_DIMS, "seqpar: an offer of ", strides.size(), " dims, at most ", SP_DIMS);
  Offer made{};
  std::copy_n(header(words), kHeader, made.header);
  made.where = where;
  std::copy(strides.begin(), strides.end(), made.strides);
  return end(number)->mailbox().credit(static_cast<int>(peer), made);
}

// The header, destination and strides of the message that `peer` expects next; empty if it expects none yet.
Ints offer_of(int64_t number, int64_t peer) {
  const Offer* found = end(number)->mailbox().offered(static_cast<int>(peer));
  if (!found) return {};
  Ints words(found->header, found->header + kHeader);
  words.push_back(found->where);
  words.insert(words.end(), found->strides, found->strides + SP_DIMS);
  return words;
}

void arrive(int64_t number, int64_t peer) { end(number)->mailbox().arrive(static_cast<int>(peer)); }

int64_t arrived(int64_t number, int64_t peer) { return end(number)->mailbox().arrived(static_cast<int>(peer)); }

Ints next(int64_t number, int64_t peer, bool receiving) {
  Place place = end(number)->mailbox().next(static_cast<int>(peer), receiving);
  return {place.slot, place.expected, place.seen};
}

int64_t bell(int64_t number) { return end(number)->mailbox().bell(); }

bool wait(int64_t number, int64_t seen, double seconds) {
  return end(number)->mailbox().wait(static_cast<uint32_t>(seen), static_cast<int64_t>(seconds * 1e9));
}

bool has_left(int64_t number, int64_t peer) { return end(number)->mailbox().has_left(static_cast<int>(peer)); }

bool ended(int64_t number, int64_t peer) { return end(number)->ended(static_cast<int>(peer)); }

void fail(int64_t number, std::string reason) { end(number)->mailbox().fail(reason); }

// "" while the group lives, else the rank that failed and its reason
std::string cause(int64_t number) {
  int rank = 0;
  std::string reason;
  return end(number)->mailbox().cause(&rank, &reason) ? std::to_string(rank) + " " + reason : "";
}

}  // namespace

}  // namespace seqpar

STABLE_TORCH_LIBRARY_FRAGMENT(seqpar_native, m) {
  m.def("shm_open(int rank, int size, int pool_bytes) -> int");
  m.def("shm_close(int end) -> ()");
  m.def("shm_address(int end) -> int[]");
  m.def("shm_map(int end, int peer, int[] address) -> ()");
  m.def("shm_ready(int end) -> ()");
  m.def("shm_empty(int end, int[] size, ScalarType dtype, int item, bool spare) -> Tensor?");
  m.def("shm_owns(int end, Tensor x) -> bool");
  m.def("shm_used(int end) -> int");
  m.def("shm_credit(int end, int peer, int[] header, Tensor target) -> bool");
  m.def("shm_push(int end, int peer, int[] header, Tensor source) -> int");
  m.def("shm_offered(int end, int peer) -> int[]");
  m.def("shm_offer(int end, int peer, int[] header, int where, int[] strides) -> bool");
  m.def("shm_offer_of(int end, int peer) -> int[]");
  m.def("shm_arrive(int end, int peer) -> ()");
  m.def("shm_arrived(int end, int peer) -> int");
  m.def("shm_next(int end, int peer, bool receiving) -> int[]");
  m.def("shm_bell(int end) -> int");
  m.def("shm_wait(int end, int seen, float seconds) -> bool");
  m.def("shm_has_left(int end, int peer) -> bool");
  m.def("shm_ended(int end, int peer) -> bool");
  m.def("shm_fail(int end, str reason) -> ()");
  m.def("shm_cause(int end) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(seqpar_native, CompositeExplicitAutograd, m) {
  m.impl("shm_open", TORCH_BOX(&seqpar::open));
  m.impl("shm_close", TORCH_BOX(&seqpar::close));
  m.impl("shm_address", TORCH_BOX(&seqpar::address));
  m.impl("shm_map", TORCH_BOX(&seqpar::map));
  m.impl("shm_ready", TORCH_BOX(&seqpar::ready));
  m.impl("shm_empty", TORCH_BOX(&seqpar::empty));
  m.impl("shm_owns", TORCH_BOX(&seqpar::owns));
  m.impl("shm_used", TORCH_BOX(&seqpar::used));
  m.impl("shm_credit", TORCH_BOX(&seqpar::credit));
  m.impl("shm_push", TORCH_BOX(&seqpar::push));
  m.impl("shm_offered", TORCH_BOX(&seqpar::offered));
  m.impl("shm_offer", TORCH_BOX(&seqpar::offer));
  m.impl("shm_offer_of", TORCH_BOX(&seqpar::offer_of));
  m.impl("shm_arrive", TORCH_BOX(&seqpar::arrive));
  m.impl("shm_arrived", TORCH_BOX(&seqpar::arrived));
  m.impl("shm_next", TORCH_BOX(&seqpar::next));
  m.impl("shm_bell", TORCH_BOX(&seqpar::bell));
  m.impl("shm_wait", TORCH_BOX(&seqpar::wait));
  m.impl("shm_has_left", TORCH_BOX(&seqpar::has_left));
  m.impl("shm_ended", TORCH_BOX(&seqpar::ended));
  m.impl("shm_fail", TORCH_BOX(&seqpar::fail));
  m.impl("shm_cause", TORCH_BOX(&seqpar::cause));
}
