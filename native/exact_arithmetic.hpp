// Floating-point arithmetic that gives the same bits whatever the program has set.
#pragma once

#include <cfenv>

namespace deltawire {

// Rounds to nearest and keeps subnormal numbers, whatever the program has set, such as torch.set_flush_denormal.
class ExactArithmetic {
public:
    ExactArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~ExactArithmetic() { std::fesetenv(&before_); }
    ExactArithmetic(const ExactArithmetic&) = delete;
    ExactArithmetic& operator=(const ExactArithmetic&) = delete;

private:
    std::fenv_t before_;
};

}  // namespace deltawire
