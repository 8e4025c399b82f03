/* std::string as torch's own wheels before 2.7 have it (_GLIBCXX_USE_CXX11_ABI=0).  libstdc++ keeps both kinds, and this
 * one's functions are called by their names: one build serves torch of either kind.  Floor 5. */
#pragma once

#include <cstddef>
#include <string>

class pya_torch_old_string {
  public:
    pya_torch_old_string(const char *text, size_t bytes);
    ~pya_torch_old_string();
    pya_torch_old_string(const pya_torch_old_string &) = delete;
    pya_torch_old_string &operator=(const pya_torch_old_string &) = delete;
    std::string copy() const;

  private:
    char *data; /* all there is of it; libstdc++ writes it */
};

/* Whether the loaded torch has such. */
bool pya_torch_has_old_strings(void);
