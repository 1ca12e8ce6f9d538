#include "shm/end.h"

#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "copy/copy.h"

namespace seqpar {

namespace {

constexpr size_t kAligned = Pool::kAlignment;

// The spare pool: a sixteenth of the pool, within limits.
size_t spare_bytes(size_t bytes) { return std::clamp<size_t>(bytes / 16, 64 << 10, 64 << 20) / kAligned * kAligned; }

}  // namespace

SharedPool::SharedPool(size_t bytes)
    : begin((bytes + kAligned - 1) / kAligned * kAligned),
      memory(begin + spare_bytes(bytes)),
      pool(bytes),
      rest(spare_bytes(bytes)) {}

int64_t SharedPool::take(int64_t bytes, bool spare) {
  int64_t offset = pool.take(bytes);
  if (offset >= 0 || !spare) return offset;
  offset = rest.take(bytes);
  return offset < 0 ? offset : offset + static_cast<int64_t>(begin);
}

void SharedPool::give(int64_t offset) {
  int64_t after = offset - static_cast<int64_t>(begin);
  after < 0 ? pool.give(offset) : rest.give(after);
}

ShmEnd::ShmEnd(int rank, int size, int64_t pool_bytes)
    : rank_(rank),
      process_(getpid()),
      own_(std::make_unique<Memfile>(Mailbox::bytes(size))),
      pool_(std::make_shared<SharedPool>(pool_bytes)),
      segments_(size),
      pools_(size),
      processes_(size) {
  if (getrandom(&nonce_, sizeof nonce_, 0) != sizeof nonce_) throw std::runtime_error("getrandom gave no bytes");
  Mailbox::format(own_->data(), size, nonce_);
}

ShmEnd::~ShmEnd() {
  // a forked child of the rank must not leave in its name
  if (mailbox_ && getpid() == process_) mailbox_->leave();
}

Address ShmEnd::address() const {
  return {process_, own_->file(), pool_->memory.file(), static_cast<int64_t>(pool_->memory.bytes()), nonce_};
}

void ShmEnd::map(int peer, const Address& at) {
  int size = static_cast<int>(segments_.size());
  processes_[peer] = std::make_unique<Process>(at.process);
  segments_[peer] = std::make_unique<Memfile>(at.process, static_cast<int>(at.mailbox_file), own_->bytes());
  if (!Mailbox::is(segments_[peer]->data(), size, at.nonce))
    throw std::runtime_error("process " + std::to_string(at.process) + " is not the one that started as rank " +
                             std::to_string(peer));
  pools_[peer] = std::make_unique<Memfile>(at.process, static_cast<int>(at.pool_file), at.pool_bytes);
}

void ShmEnd::open() {
  std::vector<void*> all;
  for (size_t rank = 0; rank < segments_.size(); ++rank)
    all.push_back(static_cast<int>(rank) == rank_ ? own_->data() : segments_[rank]->data());
  mailbox_ = std::make_unique<Mailbox>(rank_, std::move(all));
  own_->seal();
  pool_->memory.seal();
}

bool ShmEnd::owns(const View& view) const {
  const char *begin = pool_->memory.data(), *end = begin + pool_->memory.bytes();
  int64_t last = 0;
  for (size_t i = 0; i < view.sizes.size(); ++i) last += (view.sizes[i] - 1) * view.strides[i];
  return begin <= view.data && view.data + (last + 1) * view.item <= end;
}

bool ShmEnd::credit(int peer, const int64_t* header, const View& target) {
  Offer offer{};
  memcpy(offer.header, header, sizeof offer.header);
  offer.where = target.data - pool_->memory.data();
  std::copy(target.strides.begin(), target.strides.end(), offer.strides);
  return mailbox_->credit(peer, offer);
}

Pushed ShmEnd::push(int peer, const int64_t* header, const View& source, sp_parallel_for parallel_for) {
  const Offer* offer = mailbox_->offered(peer);
  if (!offer) return Pushed::kNothingOffered;
  if (memcmp(offer->header, header, sizeof offer->header) != 0) return Pushed::kOtherHeader;
  sp_copy_item item{};
  item.src = source.data;
  item.dst = pools_[peer]->data() + offer->where;
  item.ndim = static_cast<int32_t>(source.sizes.size());
  item.size = static_cast<int32_t>(source.item);
  std::copy(source.sizes.begin(), source.sizes.end(), item.shape);
  std::copy(source.strides.begin(), source.strides.end(), item.src_strides);
  std::copy(offer->strides, offer->strides + SP_DIMS, item.dst_strides);
  if (sp_copy(&item, 1, parallel_for) != 0)
    throw std::runtime_error("cannot copy elements of " + std::to_string(source.item) + " bytes");
  mailbox_->arrive(peer);
  return Pushed::kMoved;
}

}  // namespace seqpar
