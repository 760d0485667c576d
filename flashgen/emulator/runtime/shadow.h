// Shadow memory: the last write of each byte, and the reads since. Sixteen bytes that were always accessed
// together share a cell. Smaller accesses split it into cells of four bytes, and those into cells of one
// byte.
#pragma once
#include "stacks.h"

namespace flashgen::emu {

enum class How : u8 {
  load,
  store,
  ldmatrix,
  cp_async,
  cp_async_source,
  reduce_add,
  stmatrix,
  atomic_add,
  atomic_inc,
  atomic_or,
  load_acquire,
  store_release,
  wgmma,
  bulk_load,
  bulk_source,
  bulk_store,
  bulk_reduce_add
};

struct Epoch {
  const void* code;  // where in the kernel
  u32 clock;         // of the thread; 0: there was no such access
  i32 block;
  i16 thread;  // the agent: a thread, or the tensor cores of a warpgroup
  How how;
  u16 mbarrier;  // 0, or 1 + the number of the mbarrier whose phases the clock counts
};

struct Cell {
  Epoch write;
  Epoch read;
  u32 more_reads;  // index of the first in a chain of further reads, none of which is ordered before another
  u32 generation;
  bool split;
  bool in_flight;       // the write is a copy for which no thread has waited
  bool read_by_blocks;  // several unordered blocks have read it, so any write races
  u8 async_readers;     // operations in flight that read these bytes
  u16 adders;           // bulk reductions in flight; only atomic accesses are allowed meanwhile
  u16 reads;            // length of the chain
  u16 most_reads;       // length at which add_read() removes outdated reads
};

struct ReadNode {
  Epoch epoch;
  u32 next;
};

class Shadow {
 public:
  Shadow() = default;
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
  ~Shadow() { release(); }

  // Makes room for the memory at `address`; false when there is none.
  bool prepare(u64 address, u64 bytes) {
    origin_ = address & ~15ull;
    const size_t lines = (address + bytes + 15 - origin_) / 16;
    forget();
    if (lines <= lines_) return true;
    release();
    for (int level = 0; level < 3; ++level) {
      cells_[level] = reinterpret_cast<Cell*>(reserve(cell_bytes(lines, level)));
      if (cells_[level] == nullptr) return false;
    }
    lines_ = lines;
    return true;
  }

  // Forgets all accesses.
  void forget() {
    ++generation_;
    nodes_.assign(1, {});
    free_ = 0;
  }

  // Calls visit(cell) for the cells of the bytes at `address`. `makes_equal`: afterwards the cells of all
  // those bytes are the same, so those of a whole line become one again.
  template <class Visit>
  void visit(u64 address, u64 bytes, bool makes_equal, const Visit& visit) {
    u64 begin = address - origin_;
    const u64 end = begin + bytes;
    while (begin < end) {
      const u64 line = begin / 16;
      const u64 stop = end < 16 * line + 16 ? end : 16 * line + 16;
      visit_within<0>(line, begin - 16 * line, stop - 16 * line, makes_equal, visit);
      begin = stop;
    }
  }

  // Adds to the front of the chain. Removing outdated reads each time would take time proportional to the
  // number of readers, so this does it only when the chain has doubled.
  void add_read(Cell& cell, const Epoch& epoch) {
    const u32 node = new_node();
    nodes_[node] = {epoch, cell.more_reads};
    cell.more_reads = node;
    if (cell.reads < kMostReads) ++cell.reads;
    if (cell.reads < (cell.most_reads != 0 ? cell.most_reads : kFewReads)) return;
    drop_outdated_reads(cell, epoch.block);
    cell.most_reads = static_cast<u16>(cell.reads < kMostReads / 2 ? 2 * cell.reads + kFewReads : kMostReads);
  }
  void drop_reads(Cell& cell) {
    cell.read.clock = 0;
    cell.read_by_blocks = false;
    cell.reads = cell.most_reads = 0;
    while (cell.more_reads != 0) {
      const u32 node = cell.more_reads;
      cell.more_reads = nodes_[node].next;
      nodes_[node].next = free_;
      free_ = node;
    }
  }
  ReadNode& node(u32 index) { return nodes_[index]; }

 private:
  static constexpr u64 kCellBytes[3] = {16, 4, 1};
  static constexpr u16 kFewReads = 16;
  static constexpr u16 kMostReads = 0xffff;

  static size_t cell_bytes(size_t lines, int level) {
    return lines * (16 / kCellBytes[level]) * sizeof(Cell);
  }

  void release() {
    for (int level = 0; level < 3; ++level) {
      if (cells_[level] != nullptr) munmap(cells_[level], cell_bytes(lines_, level));
      cells_[level] = nullptr;
    }
    lines_ = 0;
  }

  Cell& current(int level, u64 index) {
    Cell& cell = cells_[level][index];
    if (cell.generation != generation_) {
      cell = {};
      cell.generation = generation_;
    }
    return cell;
  }

  template <int level, class Visit>
  void visit_within(u64 index, u64 begin, u64 end, bool makes_equal, const Visit& visit) {
    Cell& cell = current(level, index);
    const bool whole = end - begin == kCellBytes[level];
    if constexpr (level < 2) {
      if (whole && !cell.split) return visit(cell);
      constexpr u64 size = kCellBytes[level + 1];
      constexpr u64 parts = kCellBytes[level] / size;
      if (!cell.split) split(level, index, parts);
      for (u64 part = begin / size; part * size < end; ++part) {
        const u64 from = begin > part * size ? begin - part * size : 0;
        const u64 to = end < part * size + size ? end - part * size : size;
        visit_within<level + 1>(index * parts + part, from, to, makes_equal, visit);
      }
      if (whole && makes_equal) {
        cell = cells_[level + 1][index * parts];
        cell.split = false;
      }
    } else {
      visit(cell);
    }
  }

  void split(int level, u64 index, u64 parts) {
    Cell& cell = cells_[level][index];
    cell.split = true;
    for (u64 part = 0; part < parts; ++part) {
      Cell& copy = cells_[level + 1][index * parts + part];
      copy = cell;
      copy.split = false;
      copy.more_reads = 0;
      copy.reads = copy.most_reads = 0;
      for (u32 node = cell.more_reads; node != 0; node = nodes_[node].next) {
        const Epoch epoch = nodes_[node].epoch;
        add_read(copy, epoch);
      }
    }
    drop_reads(cell);
  }

  // Keeps only the newest read of each agent of the block, which comes first in the chain.
  void drop_outdated_reads(Cell& cell, i32 block) {
    ++search_;
    u32* link = &cell.more_reads;
    u32 kept = 0;
    while (*link != 0) {
      const u32 index = *link;
      ReadNode& node = nodes_[index];
      const auto agent = static_cast<size_t>(node.epoch.thread);
      if (agent >= last_seen_.size()) last_seen_.resize(agent + 1, 0);
      if (node.epoch.block == block && last_seen_[agent] == search_) {
        *link = node.next;
        node.next = free_;
        free_ = index;
        continue;
      }
      if (node.epoch.block == block) last_seen_[agent] = search_;
      link = &node.next;
      ++kept;
    }
    cell.reads = static_cast<u16>(kept < kMostReads ? kept : kMostReads);
  }

  u32 new_node() {
    if (free_ == 0) {
      nodes_.push_back({});
      return static_cast<u32>(nodes_.size() - 1);
    }
    const u32 node = free_;
    free_ = nodes_[node].next;
    return node;
  }

  Cell* cells_[3] = {};
  size_t lines_ = 0;
  u64 origin_ = 0;
  u32 generation_ = 0;
  std::vector<ReadNode> nodes_;
  u32 free_ = 0;
  // The search in which a read of each agent was last seen.
  std::vector<u64> last_seen_;
  u64 search_ = 0;
};

}  // namespace flashgen::emu
