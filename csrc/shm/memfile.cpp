#include "shm/memfile.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace seqpar {

namespace {

[[noreturn]] void fail(const std::string& doing) { throw std::runtime_error(doing + ": " + strerror(errno)); }

}  // namespace

Memfile::Memfile(size_t bytes) : bytes_(bytes) {
  file_ = memfd_create("seqpar", MFD_CLOEXEC);
  if (file_ < 0) fail("memfd_create");
  if (ftruncate(file_, static_cast<off_t>(bytes)) != 0) {
    int error = errno;
    close(file_);
    errno = error;
    fail("allocating " + std::to_string(bytes) + " bytes of shared memory");
  }
  map("its own");
}

Memfile::Memfile(int64_t process, int file, size_t bytes) : bytes_(bytes) {
  std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0) fail("opening " + path);
  map(path.c_str());
  seal();
}

void Memfile::map(const char* whose) {
  void* found = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (found == MAP_FAILED) {
    int error = errno;
    seal();
    errno = error;
    fail("mapping " + std::to_string(bytes_) + " bytes of " + whose + " shared memory");
  }
  data_ = static_cast<char*>(found);
}

Memfile::~Memfile() {
  seal();
  munmap(data_, bytes_);
}

void Memfile::seal() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

Process::Process(int64_t id) : id_(static_cast<pid_t>(id)), handle_(-1) {
#ifdef SYS_pidfd_open
  handle_ = static_cast<int>(syscall(SYS_pidfd_open, id_, 0));
#endif
}

Process::~Process() {
  if (handle_ >= 0) close(handle_);
}

bool Process::ended() const {
  if (handle_ < 0) return kill(id_, 0) != 0 && errno == ESRCH;
  pollfd one{handle_, POLLIN, 0};
  return poll(&one, 1, 0) > 0;
}

}  // namespace seqpar
