// The matrix products of standard attention, C = A B^T, A B or A^T B: a block computes one tile of C and
// brings tiles of A and B to shared memory in a ring of stages.
#pragma once
#include "flashgen/backward.cuh"

namespace flashgen {

struct StandardConfig {
  i32 head_dim;
  i32 head_dim_v;
  i32 tile_q;
  i32 tile_kv;
  i32 depth;
  i32 stages;
  i32 warps;
  bool has_lower;
  bool has_upper;
  i32 row_access_bytes;
  bool row_async_copy;
  bool turing;
};

// Rows of S, P and dS are padded to whole 16-byte chunks.
constexpr i32 kScoreAccessBytes = kChunkBytes;

// A matrix in device memory.
template <class T>
struct Matrix {
  T* data;
  i64 stride;
  i32 row_count;
  i32 column_count;

  FLASHGEN_DEVICE T* at(i32 row, i32 column) const { return data + row * stride + column; }
};

// The rows of S, P or dS that belong to a head.
template <class T, class Params>
FLASHGEN_DEVICE Matrix<T> scores_of(T* data, const Params& p, i32 sequence, i32 head) {
  const i64 first_row = (static_cast<i64>(sequence) * p.heads_q + head) * p.len_q;
  return {data + first_row * p.score_pitch, p.score_pitch, p.len_q, p.score_pitch};
}

// Two neighbors of a row, read with one load ...
template <class T>
struct alignas(2 * sizeof(T)) Two {
  T values[2];
};
// ... and two or four, written with one store.
FLASHGEN_DEVICE void write_two(float* to, float first, float second) {
  *reinterpret_cast<u64*>(to) = bits_of(first) | static_cast<u64>(bits_of(second)) << 32;
}
template <class T>
FLASHGEN_DEVICE void write_four(T* to, const float (&x)[4]) {
  if constexpr (kIsFloat<T>) {
    *reinterpret_cast<Vec16*>(to) = Vec16{{bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])}};
  } else {
    *reinterpret_cast<u64*>(to) = pack(T{}, x[0], x[1]) | static_cast<u64>(pack(T{}, x[2], x[3])) << 32;
  }
}

// The dimension of an operand that the product sums over.
enum class Summed { rows, columns };

// An operand in device memory, from which tile after tile along the summed dimension goes to shared memory.
// Elements beyond the matrix arrive as zeros. Where rows are summed, `to_next` elements further on lies the
// matrix whose rows come after the last one.
template <class Tile, Summed summed, i32 threads, i32 access_bytes, bool asynchronous_>
struct Operand {
  using T = typename Tile::Element;
  static constexpr bool asynchronous = asynchronous_;
  static constexpr i32 count = Tile::rows * Tile::chunks;
  static constexpr i32 per_thread = ceil_div(count, threads);

  Matrix<const T> matrix;
  i32 row, column;
  i64 to_next;
  Vec16 staged[asynchronous ? 1 : per_thread];

  FLASHGEN_DEVICE Operand(Matrix<const T> matrix_, i32 row_, i32 column_, i64 to_next_ = 0)
      : matrix(matrix_), row(row_), column(column_), to_next(to_next_) {}

  // Starts the next tile's way into `tile`.
  FLASHGEN_DEVICE void fetch(Tile tile, Thread thread) {
#pragma unroll
    for (i32 i = 0; i < per_thread; ++i) {
      const i32 index = thread.index() + i * threads;
      if (count % threads != 0 && index >= count) break;
      const i32 r = index / Tile::chunks, chunk = index % Tile::chunks;
      const i32 first_column = column + chunk * Tile::chunk_elements;
      const i32 valid = row + r < matrix.row_count ? matrix.column_count - first_column : 0;
      const T* const from = matrix.at(row + r, first_column);
      if constexpr (asynchronous) {
        copy_chunk_async<T, access_bytes>(shared_address(tile.chunk_at(r, chunk)), from, valid);
      } else {
        staged[i] = read_chunk<T, access_bytes>(from, valid);
      }
    }
    if constexpr (summed == Summed::columns) {
      column += Tile::cols;
    } else {
      row += Tile::rows;
      if (row >= matrix.row_count) {
        row = 0;
        matrix.data += to_next;
      }
    }
  }

  // Without asynchronous copies the tile waits in registers until here.
  FLASHGEN_DEVICE void land(Tile tile, Thread thread) const {
    if constexpr (!asynchronous) {
#pragma unroll
      for (i32 i = 0; i < per_thread; ++i) {
        const i32 index = thread.index() + i * threads;
        if (count % threads == 0 || index < count)
          tile.vector_at(index / Tile::chunks, index % Tile::chunks) = staged[i];
      }
    }
  }
};

// What a product does with tiles that have arrived before it multiplies them: by default nothing.
struct AsTheyAre {
  template <class A, class B>
  FLASHGEN_DEVICE void operator()(A, B, i32) const {}
};

// A product whose blocks compute rows x columns elements of C, `depth` terms of each sum at a time.
template <class T, i32 rows, i32 columns, i32 depth, Summed left, Summed right, i32 warps, i32 stages,
          bool turing>
struct Product {
  static constexpr i32 threads = warps * kWarpSize;
  static constexpr i32 steps_of_tile = depth / kStepDepth<T>;
  using ATile = SharedTile<T, left == Summed::columns ? rows : depth, left == Summed::columns ? depth : rows>;
  using BTile =
      SharedTile<T, right == Summed::columns ? columns : depth, right == Summed::columns ? depth : columns>;
  template <i32 access_bytes, bool asynchronous>
  using A = Operand<ATile, left, threads, access_bytes, asynchronous>;
  template <i32 access_bytes, bool asynchronous>
  using B = Operand<BTile, right, threads, access_bytes, asynchronous>;
  // Two warps side by side, the others below them.
  using Share = WarpShare<rows, columns, warps, warps / 2>;
  using Sums = typename Share::Product;
  static constexpr i32 bytes = stages * (ATile::bytes + BTile::bytes);

  // sums += the products of `tiles` tiles of each operand; `shared` has room for the ring.
  template <class Left, class Right, class Prepare = AsTheyAre>
  FLASHGEN_DEVICE static void add(Sums& sums, Left& a, Right& b, i32 tiles, u8* shared, Thread thread,
                                  const Prepare& prepare = {}) {
    constexpr bool asynchronous = Left::asynchronous || Right::asynchronous;
    const ATile a_ring{shared};
    const BTile b_ring{shared + stages * ATile::bytes};
#pragma unroll
    for (i32 tile = 0; tile < stages - 1; ++tile) {
      if (tile < tiles) {
        a.fetch(a_ring.slot(tile), thread);
        b.fetch(b_ring.slot(tile), thread);
        a.land(a_ring.slot(tile), thread);
        b.land(b_ring.slot(tile), thread);
      }
      commit_copies<asynchronous>();
    }
#pragma unroll 1
    for (i32 tile = 0; tile < tiles; ++tile) {
      // This tile has arrived, and no warp reads the slot any more that the next copies overwrite.
      wait_for_copies<asynchronous, stages - 2>();
      block_sync();
      const Thread here = kIsFloat<T> ? thread.recomputed() : thread;
      const i32 slot = tile % stages, next = (tile + stages - 1) % stages;
      const bool has_next = tile + stages - 1 < tiles;
      if (has_next) {
        a.fetch(a_ring.slot(next), here);
        b.fetch(b_ring.slot(next), here);
      }
      commit_copies<asynchronous>();
      const ATile a_tile = a_ring.slot(slot);
      const BTile b_tile = b_ring.slot(slot);
      prepare(a_tile, b_tile, tile);
      multiply_tile(sums, a_tile, b_tile, here);
      if (has_next) {
        a.land(a_ring.slot(next), here);
        b.land(b_ring.slot(next), here);
      }
    }
    // Every warp is done with the ring: its memory may have another use.
    block_sync();
  }

 private:
  FLASHGEN_DEVICE static void multiply_tile(Sums& sums, ATile a, BTile b, Thread thread) {
    const i32 row = Share::row(thread.warp), column = Share::column(thread.warp);
    if constexpr (left == Summed::rows) {
      multiply_by(sums, LeftColumns(a, row, thread), b, column, thread);
    } else {
      multiply_by(sums, LeftRows(a, row, thread), b, column, thread);
    }
  }
  template <class Left>
  FLASHGEN_DEVICE static void multiply_by(Sums& sums, const Left& a, BTile b, i32 column, Thread thread) {
    if constexpr (right == Summed::rows) {
      multiply<T, turing, steps_of_tile>(sums, a, RightRows<BTile, Share::aligned>(b, column, thread));
    } else {
      multiply<T, turing, steps_of_tile>(sums, a, RightTransposed(b, column, thread));
    }
  }
};

// Calls visit(row, pairs) for each row of which a lane holds some of its warp's sums. `pairs(each)` calls
// each(column, values) for each two neighbors.
template <class Share, class Visit>
FLASHGEN_DEVICE void visit_rows(typename Share::Product& sums, Thread thread, const Visit& visit) {
  const i32 row = Share::row(thread.warp) + thread.row(),
            column = Share::column(thread.warp) + thread.column();
#pragma unroll
  for (i32 m = 0; m < Share::row_blocks; ++m) {
#pragma unroll
    for (i32 h = 0; h < 2; ++h) {
      visit(row + 16 * m + 8 * h, [&](const auto& each) {
#pragma unroll
        for (i32 n = 0; n < Share::column_blocks; ++n) each(column + 8 * n, sums[m][n] + 2 * h);
      });
    }
  }
}

// Calls visit(row, column, values) for each two neighbors of a row.
template <class Share, class Visit>
FLASHGEN_DEVICE void visit_pairs(typename Share::Product& sums, Thread thread, const Visit& visit) {
  visit_rows<Share>(sums, thread, [&](i32 row, const auto& pairs) {
    pairs([&](i32 column, const float* values) { visit(row, column, values); });
  });
}

}  // namespace flashgen
