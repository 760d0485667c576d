// O += P V: the Values policy of the mainloop, for 16-bit values. wgmma reads them as TMA wrote them.
#pragma once
#include "flashgen/issue_in_fours.cuh"
#include "flashgen/sm90/careful_product.cuh"
#include "flashgen/sm90/forward_config.cuh"
#include "flashgen/sm90/row_softmax.cuh"

namespace flashgen {

template <ForwardSm90Config cfg, class T>
struct SixteenBitValues {
  // V as TMA writes it, and as products read it.
  using Loaded = PanelTile<T, cfg.tile_kv, cfg.head_dim_v>;
  using Operand = Loaded;
  // Whether warps transpose V.
  static constexpr bool transposes = false;
  // Whether steps overlap at all, and whether exponentials also overlap the consumer's own P V. With three
  // consumers the products of the other warpgroups keep the tensor cores busy, and there are no registers for
  // a second P.
  static constexpr bool overlaps_steps = true;
  static constexpr bool overlaps_own_products = cfg.consumers == 2;
  // Whether P of two steps have registers of their own.
  static constexpr bool has_two_operands = cfg.consumers == 2;
  static constexpr bool has_range = false;
  // Whether consumers issue products in turn.
  static constexpr bool takes_turns = true;
  // Whether store() clears O, and the first product of a tile adds to it.
  static constexpr bool begins_with_zero = false;

  template <class Logits>
  using Softmax = RowSoftmax<T, cfg.tile_kv, cfg.anchored, Logits>;
  using Probabilities = Rounded<cfg.tile_kv>;
  using Out = Strip<cfg.head_dim_v>;
  // The accumulators of a product, if it does not add to O itself.
  struct Product {};

  FLASHGEN_DEVICE static void round(Probabilities& probabilities, const Strip<cfg.tile_kv>& exponentials) {
    round_to<T, cfg.tile_kv>(probabilities, exponentials);
  }
  FLASHGEN_DEVICE static void issue(Product&, Out& out, const Probabilities& probabilities, Operand v,
                                    bool accumulates) {
    issue_output_in_fours(out, probabilities, v, accumulates);
  }
  // Call it when the issued product is complete.
  FLASHGEN_DEVICE static void finish(Product&, Out& out, const Probabilities&, Operand, float /*factor*/) {
    wgmma_pin(out);
  }
  FLASHGEN_DEVICE static bool holds_non_finite(Operand v, u8* base, Thread thread) {
    return panels_hold_non_finite(v, base, thread);
  }
  FLASHGEN_DEVICE static void multiply_careful(Out& out, const Probabilities& probabilities, Operand v,
                                               const u32 (&allowed)[2], float /*factor*/, Thread thread) {
    flashgen::multiply_careful(out, probabilities, v, allowed, thread);
  }
};

}  // namespace flashgen
