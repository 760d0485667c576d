// Philox 4x32-10: numbers that look drawn at random, as a function of a counter and a key (Salmon, Moraes,
// Dror and Shaw 2011). Each step of the counter, in any of its words, gives four others.
#pragma once
#include "flashgen/element.cuh"

namespace flashgen {

struct alignas(8) TwoWords {
  u32 low, high;
};

struct FourWords {
  u32 words[4];
};

FLASHGEN_DEVICE FourWords philox(const FourWords& counter, u64 key) {
  constexpr u64 kFirstFactor = 0xd2511f53u, kSecondFactor = 0xcd9e8d57u;
  constexpr u32 kFirstStep = 0x9e3779b9u, kSecondStep = 0xbb67ae85u;
  u32 first_key = static_cast<u32>(key), second_key = static_cast<u32>(key >> 32);
  u32 a = counter.words[0], b = counter.words[1], c = counter.words[2], d = counter.words[3];
#pragma unroll
  for (i32 round = 0; round < 10; ++round) {
    const TwoWords first = __builtin_bit_cast(TwoWords, kFirstFactor * a);
    const TwoWords second = __builtin_bit_cast(TwoWords, kSecondFactor * c);
    a = second.high ^ b ^ first_key;
    b = second.low;
    c = first.high ^ d ^ second_key;
    d = first.low;
    first_key += kFirstStep;
    second_key += kSecondStep;
  }
  return {{a, b, c, d}};
}

}  // namespace flashgen
