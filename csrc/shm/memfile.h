// Memory that processes of one machine share without a name in any file system, and whether such a process still runs.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

namespace seqpar {

// A mapping of memory that others can map too; it lives until the last of them is gone, and pages that nobody has
// touched take no room. Failures throw std::runtime_error.
class Memfile {
 public:
  explicit Memfile(size_t bytes);                    // makes it
  Memfile(int64_t process, int file, size_t bytes);  // maps that of another process, by its number for it there
  ~Memfile();
  Memfile(const Memfile&) = delete;
  Memfile& operator=(const Memfile&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int file() const { return file_; }
  // When everyone has mapped it: nobody else can find it any more.
  void seal();

 private:
  void map(const char* whose);

  int file_ = -1;
  size_t bytes_ = 0;
  char* data_ = nullptr;
};

// Another process, or this one.
class Process {
 public:
  explicit Process(int64_t id);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool ended() const;

 private:
  pid_t id_;
  int handle_;  // -1 where the kernel has none (before Linux 5.3): a dead process then seems alive until it is reaped
};

}  // namespace seqpar
