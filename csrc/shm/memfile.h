// Anonymous memory shared by processes of one machine, and whether such a process still runs.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

namespace seqpar {

// A mapping of memory that other processes can map too. It lives until the last mapping is gone; untouched pages take
// no space. Failures throw std::runtime_error.
class Memfile {
 public:
  explicit Memfile(size_t bytes);                    // allocates it
  Memfile(int64_t process, int file, size_t bytes);  // maps the memory behind another process's file descriptor
  ~Memfile();
  Memfile(const Memfile&) = delete;
  Memfile& operator=(const Memfile&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int file() const { return file_; }
  // Once everyone has mapped the memory: no one else can map it any more.
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
  int handle_;  // -1 before Linux 5.3, which has no pidfd: a dead process then seems alive until it is reaped
};

}  // namespace seqpar
