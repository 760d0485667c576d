// Dropout of probabilities: the Dropout policy of the mainloop.
#pragma once
#include "flashgen/dropout.cuh"
#include "flashgen/panel.cuh"

namespace flashgen {

// Keeps all pairs.
struct NoDropout {
  template <i32 columns>
  FLASHGEN_DEVICE static NoDropout draw(const auto&...) {
    return {};
  }
  template <i32 columns>
  FLASHGEN_DEVICE static void apply(Strip<columns>&, NoDropout) {}
  FLASHGEN_DEVICE static float factor(const auto&) { return 1.0f; }
};

struct PhiloxDropout {
  // Which of a lane's pairs of a block are kept.
  template <i32 columns>
  using Kept = KeptPairs<1, columns / 8>;

  // For the warp's rows from `q` on and the keys from `key` on. Numbers do not depend on scores, so they are
  // drawn while products are under way.
  template <i32 columns>
  FLASHGEN_DEVICE static Kept<columns> draw(const auto& p, const auto& tile, i32 q, i32 key, Thread thread) {
    return {Dropout::of(p, tile.sequence, tile.head), q, key, thread};
  }
  template <i32 columns>
  FLASHGEN_DEVICE static void apply(Strip<columns>& exponentials, const Kept<columns>& kept) {
    kept.keep(blocks_of(exponentials), 1.0f);
  }
  // What O is multiplied by, as only some pairs are kept.
  FLASHGEN_DEVICE static float factor(const auto& p) { return p.dropout_factor; }
};

}  // namespace flashgen
